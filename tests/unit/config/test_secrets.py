"""Messages about a config contain none of its secrets, wherever they are in it. The config itself has them."""

from __future__ import annotations

import copy
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gracetune.cli.config import _as_json, check_file
from gracetune.config import Environment, load, native
from gracetune.config.dataset_config import StorageAccess
from gracetune.config.url_credentials import split_address
from gracetune.errors import ConfigError
from gracetune.redaction import Redactor, is_secret_name
from unit.config.aitoolkit_jobs import job
from unit.config.simpletuner_files import GOOD
from unit.config.test_simpletuner_mutations import DATASETS, RICH

SECRET = st.text(string.ascii_letters + string.digits, min_size=20, max_size=110).filter(
    lambda text: not text.isalpha() and not text.isdecimal()
)
"""Also longer than what a message shows of a value."""
OURS: dict[str, Any] = {
    "gracetune": 1, "name": "a", "output_dir": "out", "model": {"family": "flux", "path": "x"},
    "datasets": [{"id": "a", "path": "p", "captions": {"default": "x", "instance_prompt": "y"}, "cache_dir": "c"}],
    "training": {"max_steps": 1}, "validation": {"prompts": [{"prompt": "x"}], "negative_prompt": "y"},
    "optimizer": {"name": "adamw", "options": {"a": "b"}}, "logging": {"project": "p", "webhook": "https://h/x"},
    "adapter": {"targets": ["a"], "by_module": {"A": {"algo": "lora"}}},
}  # fmt: skip
CONFIGS = [OURS, RICH, {**GOOD, "datasets": DATASETS}, job()]
FORMS = (
    "https://me:{}@host/x",
    "{}",
    "s3://host/x?token={}",
    "see https://{}@host/x now",
    "hf_{}",
    "--hub_token={}",
    "x",
)
NAMES = ("hub_token", "--wandb_api_key", "aws_secret_access_key", "password", "hf_token", "webhook_url")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value, and of every mapping that a key can be added to."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places(item, (*path, key))


def placed(config: Any, path: tuple[Any, ...], secret: str, form: str, name: str) -> Any:
    """With the secret at a place: in the value, or below a key of a mapping that says that it is one."""
    config = copy.deepcopy(config)
    node, last = config, None
    for step in path:
        node, last = node[step], node
    if isinstance(node, dict):
        node[name] = secret
    elif last is not None and form not in ("{}", "x"):
        last[path[-1]] = form.format(secret)
    return config


def text_about(path: Path, environment: Environment, overrides: list[str]) -> str:
    checked = check_file(path, environment, overrides, allow_unsupported=True, paths=False)
    texts = [json.dumps(checked.as_json()), str(checked.problems), *checked.notes]
    try:
        resolved = load(path, environment=environment, overrides=overrides)
    except ConfigError as error:
        texts += [str(error), str(error.problems)]
    else:
        texts += [
            native.show(resolved.config, resolved.origins, resolved.redactor),
            json.dumps(_as_json(resolved)),
            str(resolved.notes),
        ]
    return "\n".join(texts)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), SECRET)
def test_no_secret_of_a_file_is_repeated(tmp_path: Path, data: st.DataObject, secret: str) -> None:
    config = data.draw(st.sampled_from(CONFIGS))
    path = data.draw(st.sampled_from([*places(config)]))
    form, name = data.draw(st.sampled_from(FORMS)), data.draw(st.sampled_from(NAMES))
    text = json.dumps(placed(config, path, secret, form, name))
    if data.draw(st.booleans(), label="broken"):
        text = text[: data.draw(st.integers(1, len(text)))]
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "datasets.json").write_text(json.dumps([{**DATASETS[0], name: secret}]))
    assert secret not in text_about(tmp_path / "config.json", Environment({}), [])


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), SECRET)
def test_nor_one_of_a_flag_or_of_the_environment(tmp_path: Path, data: st.DataObject, secret: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**job(), "meta": {"name": "${SOME_TOKEN}"}}))
    flags = ["logging.webhook=https://h/{}", "hub_token={}", "training.max_steps=https://me:{}@host/", "secret={}",
             "datasets[0].path=https://{}@host/x", "datasets[9].password={}", "name=https://me:{}@host/"]  # fmt: skip
    chosen = data.draw(st.lists(st.sampled_from(flags), max_size=3))
    environment = Environment({"SOME_TOKEN": secret, "GH200_UVM_SECRET": secret, "HTTPS_PROXY": f"http://a:{secret}@p"})
    assert secret not in text_about(file, environment, [one.format(secret) for one in chosen])


@pytest.mark.parametrize(
    ("values", "key", "found"),
    [
        ({"hub_token": "abc"}, "hub_token", "(hidden)"),
        ({"--wandb_api_key": 1234}, "--wandb_api_key", "(hidden)"),
        ({"passwrd": "abc"}, "passwrd", '"abc"'),
        ({"learning_rate": "https://me:pw@host/x"}, "learning_rate", '"https://(hidden)@host/x"'),
    ],
)
def test_what_a_problem_shows_instead(tmp_path: Path, values: dict[str, Any], key: str, found: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GOOD, **values}))
    with pytest.raises(ConfigError) as caught:
        load(path, environment=Environment({}))
    problem = next(one for one in caught.value.problems if one.key == key)
    assert problem.found == found
    assert "abc" not in problem.hint or found == '"abc"'


def test_what_was_hidden_cannot_be_used(tmp_path: Path) -> None:
    """Otherwise a run that is started from what `config show` prints would ask the wrong address."""
    path = tmp_path / "config.yaml"
    values = copy.deepcopy(OURS)
    values["logging"]["webhook"] = "https://host/services/x"
    values["datasets"][0]["path"] = "https://me:pw@host/x"
    values["datasets"].append({"id": "b", "path": "https://token@host/x.tar?sig=abc"})
    values["validation"]["negative_prompt"] = "hands (hidden)"
    path.write_text(json.dumps(values))
    config = load(path, environment=Environment({})).config
    assert config.logging.webhook == "https://host/services/x"
    path.write_text(native.show(config, {}, Redactor()))
    with pytest.raises(ConfigError) as caught:
        load(path, environment=Environment({}))
    assert [one.key for one in caught.value.problems] == [
        "datasets[0].storage.password", "datasets[1].storage.password", "datasets[1].storage.signature",
        "logging.webhook",
    ]  # fmt: skip
    path.write_text(native.write(config))
    assert load(path, environment=Environment({})).config == config


@given(SECRET, SECRET, SECRET)
def test_addresses_are_taken_apart(user: str, password: str, query: str) -> None:
    found = split_address(f"https://{user}:{password}@host/x.tar?{query}")
    assert found == ("https://host/x.tar", {"user": user, "password": password, "signature": query})
    assert split_address(f"https://{password}@host/x") == ("https://host/x", {"password": password})
    assert split_address(f"s3://{user}/x?y") == (f"s3://{user}/x?y", {})


def test_names_of_secrets_are_recognized() -> None:
    """Redaction goes by names."""
    marked = {name for name, field in StorageAccess.model_fields.items() if not field.repr}
    assert marked == {name for name in StorageAccess.model_fields if is_secret_name(name)}
    assert len(marked) == 6


def test_a_wrong_value_of_a_secret_is_not_shown(tmp_path: Path) -> None:
    values = copy.deepcopy(OURS)
    values["datasets"][0] |= {"path": "s3://b", "storage": {"secret_access_key": 123456789}}
    path = tmp_path / "c.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as rejected:
        load(path, environment=Environment({}))
    assert "datasets[0].storage.secret_access_key" in str(rejected.value)
    assert "123456789" not in str(rejected.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logging.webhook", "http://[::1/S3cret"),
        ("logging.webhook", "https://host:port/S3cret"),
        ("logging.webhook", "S3cret"),
        ("output_dir", "https://me:S3cret@host/out"),
        ("cache.cache_dir", "s3://me:S3cret@bucket/cache"),
        ("datasets[0].cache_dir", "https://S3cret@host/cache"),
    ],
)
def test_addresses_that_a_run_cannot_use(tmp_path: Path, key: str, value: str) -> None:
    """A run that took such a folder for a path would write the login into the name of a folder."""
    path = tmp_path / "c.json"
    path.write_text(json.dumps(OURS))
    with pytest.raises(ConfigError) as caught:
        load(path, environment=Environment({}), overrides=[f"{key}={value}"])
    (problem,) = caught.value.problems
    assert problem.key.endswith(key)
    assert "S3cret" not in str(caught.value)
