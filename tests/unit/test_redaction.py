"""The one rule about secrets in text."""

from __future__ import annotations

import json
import string
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.errors import ConfigError, GracetuneError, Problem
from gracetune.redaction import HIDDEN, Redactor, is_secret_name, redact, redact_values, redact_webhook
from gracetune.telemetry.errors import TelemetryError

SECRET = st.text(string.ascii_letters + string.digits, min_size=12, max_size=40).filter(
    lambda text: not text.isalpha() and not text.isdecimal()
)
"""As services make them. No word of ours is one."""
AWKWARD = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=12, max_size=30).filter(
    lambda text: text.strip() == text and not set("@/?#") & set(text) and len(set(text)) > 4 and not text.isalpha()
)
"""As people make them."""
NAMES = ("hub_token", "--hub_token", "HF_TOKEN", "wandb_api_key", "WANDB_API_KEY", "aws_secret_access_key", "password",
         "datasets[0].aws_session_token", "apiKey", "secret", "client-secret", "credential", "access_key", "auth",
         "Authorization", "hf_token", "token", "sig", "private_key")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["tokens", "keep_tokens", "pad_token", "trigger_token", "tokenizer_max_length", "caption_key", "key", "keys",
     "path", "PWD", "OLDPWD", "compass", "author", "design", "signal", "", "[0]", "webhook", "max_token_length"],
)  # fmt: skip
def test_names_of_anything_else(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pw@host/data", "https://(hidden)@host/data"),
        ("look at https://pw@host:81/data, please", "look at https://(hidden)@host:81/data, please"),
        ("'s3://a:b@c/d'", "'s3://(hidden)@c/d'"),
        ("zip://a.zip::https://u:p@h/a.zip", "zip://a.zip::https://(hidden)@h/a.zip"),
        ("https://user:p/w@host/x", "https://(hidden)@host/x"),
        ("https://h/f?X-Amz-Signature=abc&download=1", "https://h/f?(hidden)"),
        ("https://h/f#access_token=abc", "https://h/f#(hidden)"),
        ("https://h/f#part", "https://h/f#part"),
        ("https://hooks.slack.com/services/T0/B0/x", "https://hooks.slack.com/(hidden)"),
        ("https://discord.com/api/webhooks/1/abc", "https://discord.com/(hidden)"),
        ("https://api.telegram.org/bot123:abc/sendMessage", "https://api.telegram.org/(hidden)"),
        ("hf://datasets/owner/name@main/x", "hf://datasets/owner/name@main/x"),
        ("https://host:8080/@me/x", "https://host:8080/@me/x"),
        ("--hub_token=abc --seed=1", "--hub_token=(hidden) --seed=1"),
        ("--hub_token abc --seed 1", "--hub_token (hidden) --seed 1"),
        ('{"wandb_api_key": "a b", "x": 1}', '{"wandb_api_key": "(hidden)", "x": 1}'),
        ("AWS_SECRET_ACCESS_KEY=a/b+c", "AWS_SECRET_ACCESS_KEY=(hidden)"),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "Authorization: (hidden) (hidden)"),
        ("export HF_TOKEN=...", "export HF_TOKEN=..."),
        ("export HF_TOKEN=$TOKEN", "export HF_TOKEN=$TOKEN"),
        (f"got hf_{'aB3' * 11}!", "got (hidden)!"),
        ("hf_transfer and hf_hub_download", "hf_transfer and hf_hub_download"),
        ("77 tokens: a cat, key: 3", "77 tokens: a cat, key: 3"),
        ("a token: gold, worn. Signature: illegible.", "a token: gold, worn. Signature: illegible."),
        ("token: gold7, password: gold", "token: (hidden), password: (hidden)"),
        ("https:/me:pw@host/c.yaml", "https:/(hidden)@host/c.yaml"),
        ("no file /home/me/s3:/pw@bucket/x", "no file /home/me/s3:/(hidden)@bucket/x"),
        ("me:pw@host:/data/x", "(hidden)@host:/data/x"),
        ("there is no `me:pw@host:` here", "there is no `(hidden)@host:` here"),
        ("me:pw@host: connection refused", "(hidden)@host: connection refused"),
        ("path=me:p/w:x@10.0.0.7:data, then", "path=(hidden)@10.0.0.7:data, then"),
        ("no file /home/me/u:p@ss@nas.local:/x", "no file /home/me/(hidden)@nas.local:/x"),
        ("'u:p@[fe80::1]:/x' and u2:q@h2:y", "'(hidden)@[fe80::1]:/x' and (hidden)@h2:y"),
        ("git@github.com:me/x and me@host:/x", "git@github.com:me/x and me@host:/x"),
        ("error: me@host:/x at 12:30: a@b.c: gone", "error: me@host:/x at 12:30: a@b.c: gone"),
        ("mail: me@example.com, or:you@example.com", "mail: me@example.com, or:you@example.com"),
        ("image:1.2@sha256:0abc", "image:1.2@sha256:0abc"),
        ("a sign: SALE @noon: 5:30 (he:she@home)", "a sign: SALE @noon: 5:30 (he:she@home)"),
        ("C:/me@home/x and /data@2024/x:/y@z", "C:/me@home/x and /data@2024/x:/y@z"),
        ("//me:pw@host/share", "//(hidden)@host/share"),
        ("no folder me:pw@nas.local/x, or u:p@10.0.0.7/x", "no folder (hidden)@nas.local/x, or (hidden)@10.0.0.7/x"),
        ("'u:p@ss@h/x' and u:p@[::1]/x", "'(hidden)@h/x' and (hidden)@[::1]/x"),
        ("me@host/x and 8:30 @home/x", "me@host/x and 8:30 @home/x"),
        ("<lora:style@0.8/0.9> image:1.2@sha256:0abc/x", "<lora:style@0.8/0.9> image:1.2@sha256:0abc/x"),
        ("datasets[0].path: found 3, expected 4", "datasets[0].path: found 3, expected 4"),
    ],
)
def test_what_is_recognized_in_text(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://h.example/services/a/b", "https://h.example/(hidden)"),
        ("https://me:pw@h/x?y=1", "https://h/(hidden)"),
        ("http://[::1]:80/x", "http://[::1]:80/(hidden)"),
        ("http://[::1/x", "(hidden)"),
        ("abc", "(hidden)"),
        ("htt ps://h/x", "(hidden)"),
        ("https:///x", "(hidden)"),
    ],
)
def test_a_webhook_is_its_host(url: str, shown: str) -> None:
    assert redact_webhook(url) == shown
    assert redact_values({"logging": {"webhook": url}}) == {"logging": {"webhook": shown}}


def test_values_are_hidden_by_their_keys_whatever_they_are() -> None:
    values = {"hub_token": "x", "password": 1234, "secret": {"a": ["b", 2, None, True]}, "use_auth_token": True,
              "keep": [1, "x", None], "webhook_config": {"url": "https://h/x", "type": "discord"}}  # fmt: skip
    assert redact_values(values) == {
        "hub_token": HIDDEN, "password": HIDDEN, "secret": {"a": [HIDDEN, HIDDEN, None, True]}, "use_auth_token": True,
        "keep": [1, "x", None], "webhook_config": {"url": f"https://h/{HIDDEN}", "type": "discord"},
    }  # fmt: skip
    assert redact_values({"password": "$ummer2024", "token": "${hf_token}"}) == {
        "password": HIDDEN, "token": "${hf_token}",
    }  # fmt: skip


@pytest.mark.parametrize("reference", ["$HF_TOKEN", "${HF_TOKEN}", " ${hf_token} "])
def test_a_reference_to_a_variable_is_no_secret(reference: str) -> None:
    assert Redactor({"hub_token": reference}).redact(f"{reference} is not set") == f"{reference} is not set"
    assert redact_values({"hub_token": reference}) == {"hub_token": reference}


def values_with(secret: str) -> list[Any]:
    """Values that are a secret, or a URL with one."""
    return [
        {"path": f"https://me:{secret}@host/data"},
        {"path": f"https://{secret}@host/data"},
        {"logging": {"webhook": f"https://host/services/{secret}"}},
        {"logging": {"webhook": f"http://[::1/{secret}"}},
        {"logging": {"webhook": secret}},
        {"hub_token": secret},
        {"--wandb_api_key": secret},
        [{"options": {"auth": {"any": [secret]}}}],
    ]


def texts_with(secret: str) -> list[Any]:
    """Texts that mention one."""
    return [
        {"path": f"s3://host/data?X-Amz-Signature={secret}"},
        {"prompt": f"a picture from https://me:{secret}@host/x.png"},
        {"args": f"--seed=1 --hub_token={secret}"},
        {"path": f"me:{secret}@host:/data"},
        {"error": f"no file /home/me/me:{secret}@nas.local:data/x"},
        {"path": f"//me:{secret}@host/share"},
        [f"WANDB_API_KEY='{secret}'"],
    ]


@given(SECRET)
def test_no_secret_is_left_in_values(secret: str) -> None:
    for carrier in (*values_with(secret), *texts_with(secret), *({name: secret} for name in NAMES)):
        assert secret not in json.dumps(redact_values(carrier))


@settings(deadline=None)
@given(st.booleans().flatmap(lambda plain: st.tuples(SECRET if plain else AWKWARD, st.just(plain))), st.data())
def test_what_was_learned_is_hidden_wherever_it_turns_up(values: tuple[str, bool], data: st.DataObject) -> None:
    secret, is_plain = values
    carrier = data.draw(st.sampled_from(values_with(secret) + (texts_with(secret) if is_plain else [])))
    before, after = data.draw(st.text(max_size=20)), data.draw(st.text(max_size=20))
    redactor = Redactor(carrier)
    text = f"{before}{secret}{after}"
    assert secret not in redactor.redact(text)
    assert json.dumps(secret)[1:-1] not in json.dumps(redactor.redact_values({"error": text, "other": [text]}))
    assert json.dumps(secret)[1:-1] not in redactor.redact(json.dumps(carrier))


@given(SECRET, st.integers(0, 20), st.integers(12, 40))
def test_half_a_secret_is_hidden_too(secret: str, start: int, length: int) -> None:
    part = secret[start : start + length]
    if len(part) >= 12:
        assert part not in Redactor({"token": secret}).redact(f'found "{part}..."')


@given(st.text(max_size=300))
def test_redacting_twice_changes_nothing_more(text: str) -> None:
    once = redact(text)
    assert redact(once) == once


@given(st.text(st.sampled_from("ab1 .,;:/@?#&=-_\"'(){}[]\\\n"), max_size=80))
def test_redacting_odd_text_twice_changes_nothing_more(text: str) -> None:
    for shape in (text, f"https://{text}", f"--token={text}", f"token: {text}"):
        once = redact(shape)
        assert redact(once) == once


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=30), max_size=4))
def test_json_stays_json(values: dict[str, str]) -> None:
    text = json.dumps({**values, "hub_token": 'a"b\\c', "url": 'https://a:"b@c/d'})
    json.loads(redact(text))


def test_words_of_a_prompt_are_not_learned() -> None:
    prompt = "a secret: garden, with the mark token: butterfly"
    assert Redactor({"prompt": prompt}).redact(f"butterfly.png: {prompt}") == f"butterfly.png: {prompt}"


def test_a_document_is_not_taken_for_one_url() -> None:
    text = '{"path": "https://host/a", "prompt": "what is this?", "mail": "me@host", "steps": 1000, "name": "x"}'
    assert Redactor(text, text.replace(", ", ",\n")).redact(text) == text


def test_errors_hold_no_secret() -> None:
    url = "https://me:pw123456@host/data"
    problem = Problem(f"dataset {url}", url, "a folder", f"--set path={url}", url)
    shown = [str(problem), str(ConfigError([problem])), str(GracetuneError(f"{url} cannot be opened"))]
    shown.append(str(TelemetryError(url, found=url, expected=url, hint=url)))
    assert not any("pw123456" in text for text in shown)
    assert all("https://(hidden)@host/data" in text for text in shown)


@pytest.mark.parametrize("unit", ["a", "://", "ab:/", "ab:/a@", "https://", "::a://", "a:", "a=", "token=", "--token ",
                                  "@", "hf_", "eyJ", '"', "token: '", "?a=", "Bearer ", "a.", "-"])  # fmt: skip
def test_long_text_takes_no_time(unit: str) -> None:
    text = unit * (120_000 // len(unit))
    redactor = Redactor({"token": "x" * 20 + "y", "api_key": "zzzzzz1"})
    began = time.process_time()
    redactor.redact(text)
    redactor.learn({"x": text, "token": text[:60_000]})
    assert time.process_time() - began < 1
