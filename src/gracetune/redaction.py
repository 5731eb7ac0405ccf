"""Redaction of secrets from all text that leaves the process: messages, logs, events and saved configs.

redact("https://me:secret@host/data")          # https://(hidden)@host/data
redact_values({"hub_token": "hf_abc"})         # {"hub_token": "(hidden)"}

Secrets are recognized by position and form:

- the login and the query of a URL
- the login of `user:password@host:/path` and `user:password@host/path`
- the address of a webhook, except for its host
- values of names such as `hub_token` or `WANDB_API_KEY`
- tokens of known services

A `Redactor` also learns the secrets of a configuration and of the environment. It hides them wherever they occur: in
the message of a library, truncated, or escaped.

Only text that is shown, logged or saved for others is redacted. Values in use are never changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote, unquote

HIDDEN: Final = "(hidden)"
SHORTEST: Final = 6
"""The minimum length of a known secret that is hidden wherever it occurs. A shorter one could be part of any word, so
it is hidden only at its own position."""
LONGEST_CUT: Final = 12
"""This many consecutive characters of a longer secret are hidden too, because messages truncate long values."""


def redact(text: str) -> str:
    """The text with all recognizable secrets hidden."""
    text = _TOKEN.sub(HIDDEN, text)
    if "://" in text:
        text = _URL.sub(lambda found: f"://{_redact_url(found[1])}", text)
    if ":/" in text and "@" in text:
        text = _URL_AS_PATH.sub(rf"\1{HIDDEN}@", text)
    if "@" in text and ":" in text:
        text = _without_remote_logins(text)
    if _MAY_NAME_SECRET.search(text):
        text = _PAIR.sub(_redact_pair, text)
        text = _FLAG.sub(_redact_pair, text)
    return text


def redact_values(value: Any, name: str = "") -> Any:
    """Redact nested data. A key's name decides whether its value is a secret. Keys are redacted as text too."""
    return _redacted(value, name, redact)


def is_secret_name(name: str) -> bool:
    """Whether a key, option or variable of this name holds a secret: `hub_token`, `datasets[0].aws_secret_key`."""
    return _is_secret(name[-200:].rpartition(".")[2])


# -- URLs -------------------------------------------------------------------------------------------------------------

_URL: Final = re.compile(r"""://([^\s"'<>`\\]+)""")
_URL_AS_PATH: Final = re.compile(r"""\b([A-Za-z][A-Za-z0-9+.-]{1,30}:/)[^/\s"'<>`\\]+@""")
"""`https:/me:secret@host`: `pathlib` collapses two slashes into one. The scheme has at least two letters, so a Windows
drive does not match."""
_CHAINED: Final = re.compile(r"(?=::[A-Za-z0-9+.-]{1,30}://)")
"""The boundary between two URLs that fsspec chains."""
_SCHEME: Final = re.compile(r"\s*[A-Za-z0-9+.:-]{1,60}")
"""The scheme of a text that consists of one URL, which may be chained."""
_END: Final = re.compile(r"[/?#]")
_HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.%]*\]|[^:\[\]]*)(?::\d*)?\Z")
_HOOK: Final = re.compile(r"hook|/bot\d+:", re.IGNORECASE)
_MAY_HOLD_SECRET: Final = re.compile(r"[@?#]|hook|/bot\d+:", re.IGNORECASE)
"""A URL that matches none of these holds no secret."""


def _redact_url(rest: str) -> str:
    """Redact what follows `://`. fsspec chains URLs: `zip://inside.zip::https://host/outside.zip`."""
    first, *chained = _CHAINED.split(rest) if "://" in rest else [rest]
    shown = [_redact_address(first)]
    for url in chained:
        scheme, sign, address = url.partition("://")
        shown.append(f"{scheme}{sign}{_redact_address(address)}")
    return "".join(shown)


def _redact_address(rest: str) -> str:
    login, address = _split_login(rest)
    host, path, query, fragment = _split_address(address)
    if path.strip("/") and _HOOK.search(host + path):
        path = f"/{HIDDEN}"
    query = f"?{HIDDEN}" if query else ""
    fragment = f"#{HIDDEN}" if "=" in fragment else fragment
    return f"{f'{HIDDEN}@' if login else ''}{host}{path}{query}{fragment}"


def _split_login(rest: str) -> tuple[str, str]:
    """Split `login@address`. The login may hold a slash that should have been escaped."""
    found = _END.search(rest)
    end = found.start() if found is not None else len(rest)
    authority = rest[:end]
    if "@" in authority:
        login, _, host = authority.rpartition("@")
        return login, host + rest[end:]
    if "@" in rest and _HOST.match(authority) is None:
        login, _, address = rest.rpartition("@")
        return login, address
    return "", rest


def _split_address(address: str) -> tuple[str, str, str, str]:
    """Host, path, query and fragment. Path and fragment keep their leading `/` and `#`."""
    before, sign, fragment = address.partition("#")
    before, _, query = before.partition("?")
    host, slash, path = before.partition("/")
    return host, slash + path, query, sign + fragment


_REMOTE_HOST: Final = re.compile(
    r"""@(?!sha\d+:)(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}+)|\[[0-9A-Fa-f:.%]{2,60}+\]):(?!@)"""
    r"""|@(?:[A-Za-z](?:[A-Za-z0-9.-]{0,252}+)|\d{1,3}+(?:\.\d{1,3}+){3}|\[[0-9A-Fa-f:.%]{2,60}+\])(?P<slash>/)"""
)
"""`@host:` in the syntax of scp and rsync, or `@host/` as in an address without its scheme (`//me:secret@host/share`).
The `@sha256:` of a container image is a digest and the `@0.8/` of a prompt is a number, so they do not match."""
_REMOTE_LOGIN: Final = re.compile(r"""(?<![^\s"'<>`\\=(,;/])([^\s"'<>`\\=(,;/:@]{1,64}):([^\s"'<>`\\]{1,256})\Z""")
"""`user:password` at the end of the text, which is cut before the `@`."""
_LONGEST_LOGIN: Final = 330
"""Characters before the `@` that are searched for a login: a bound on the time for long texts."""


def _remote_logins(text: str) -> Iterator[tuple[int, int, str]]:
    """Find each `user:password@host:/path` and `user:password@host/path`.

    Yields the start and end of the login, and the password.
    """
    done = 0
    for found in _REMOTE_HOST.finditer(text):
        at = found.start()
        first = max(done, at - _LONGEST_LOGIN)
        login = _REMOTE_LOGIN.search(text[first:at])
        done = at + 1
        if login is None or "://" in login[0] or login[2].endswith(HIDDEN):
            continue
        # A password before `@host/` has no slash: `host:8080/@me/x` is a port and a path.
        if found["slash"] is None or "/" not in login[2]:
            yield first + login.start(), at, login[2]


def _without_remote_logins(text: str) -> str:
    parts, kept = [], 0
    for begin, end, _ in _remote_logins(text):
        parts += [text[kept:begin], HIDDEN]
        kept = end
    return "".join([*parts, text[kept:]]) if parts else text


def redact_webhook(url: str) -> str:
    """Scheme and host of a webhook URL. The rest of the address works as its password."""
    scheme, sign, rest = url.strip().partition("://")
    host = _split_address(_split_login(rest)[1])[0]
    if not sign or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme) or not host or _HOST.match(host) is None:
        return HIDDEN
    return f"{scheme}://{redact(host)}/{HIDDEN}"


# -- names and values -------------------------------------------------------------------------------------------------

_MAY_NAME_SECRET: Final = re.compile(
    r"token|secret|pass|pwd|credential|key|auth|cookie|signature|sig\b|bearer|connection.?string", re.IGNORECASE
)
_VALUE = r"""("[^\s,:}\]"\\](?:[^"\\\n]|\\.)*+"|'[^\s,:}\]'"\\][^'"\\\n]*+'|[^\s"',;&(){}\[\]\\][^\s"',;&)}\]\\]*+)"""
"""A quoted or unquoted value. The text after a closing quote in JSON does not count as a quoted value, and brackets and
escapes are never split."""
_PAIR: Final = re.compile(rf"""(?<![\w.-])([\w.-]{{1,80}}+)(["']?\ {{0,3}}[=:]\ {{0,3}}){_VALUE}""")
"""`NAME=value`, `"name": "value"`, `--name=value`."""
_FLAG: Final = re.compile(rf"(?<![\w.-])(--[\w.-]{{1,80}}+)(\ {{1,3}}){_VALUE}")
"""`--name value`."""
_PLACEHOLDER: Final = re.compile(
    r"""["']?(?:[.…<>*-]*|\$[A-Z_][A-Z0-9_]*|\$\{[A-Za-z_]\w*\}?|\(hidden\)?|null|true|false|None|True|False)["']?"""
)
"""Values that are not secrets: `...`, `<>`, `$HF_TOKEN`, `${hf_token}`, `null`, and what is already hidden. A variable
without braces is in upper case, because a password can begin with `$`."""
_TOKEN: Final = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[opsu]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bAKIA[0-9A-Z]{16}|\bxox[a-z]-[\w-]{10,}|\bglpat-[\w-]{16,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|(?<=\bBearer )[\w.~+/=-]{16,}|(?<=\bBasic )[\w.~+/=-]{16,}"
)
"""Tokens of Hugging Face, OpenAI, GitHub, AWS, Slack and GitLab; JSON Web Tokens; HTTP authorization headers."""


def _holds_secret(found: re.Match[str]) -> bool:
    """Whether the value of a name-value pair is a secret. `a token: gold, worn` is prose and not a pair."""
    name, sign, value = found[1], found[2], found[3]
    is_sentence = name.lower() in _ALSO_IN_PROSE and sign.startswith(": ") and _WORD.fullmatch(value) is not None
    return is_secret_name(name) and not is_sentence and not _PLACEHOLDER.fullmatch(value)


def _redact_pair(found: re.Match[str]) -> str:
    name, sign, value = found[1], found[2], found[3]
    if not _holds_secret(found) or value.startswith(HIDDEN[:-1]):
        return found[0]
    mark = value[0] if value[0] in "\"'" else ""
    return f"{name}{sign}{mark}{HIDDEN}{mark}"


# A name is split into words at case changes, digits and punctuation. It is secret if its words joined together contain
# "secret" or "password" or end in one of _SECRET_ENDINGS, or if its last word is one of _SECRET_WORDS.
_SECRET_ENDINGS: Final = (
    "token", "password", "passwd", "passphrase", "credential", "credentials", "apikey", "accesskey", "secretkey",
    "privatekey", "accountkey", "authkey", "accesskeyid", "authorization", "signature", "connectionstring",
)  # fmt: skip
_SECRET_WORDS: Final = frozenset(("pwd", "pass", "auth", "cookie", "sig", "bearer", "secret", "secrets", "pat"))
_ALSO_IN_PROSE: Final = frozenset(("token", "secret", "secrets", "signature", "cookie", "auth"))
_WORD: Final = re.compile(r"[a-z]+[.!?]?")
_NO_SECRET_TOKENS: Final = frozenset((
    "pad", "eos", "bos", "unk", "mask", "cls", "sep", "special", "trigger", "instance", "class", "placeholder",
    "initializer", "concept", "image", "picture", "text", "video", "audio", "frame", "per", "max", "min", "new", "next",
    "last", "first", "stop", "start", "end", "time", "extra", "null", "empty", "by",
))  # fmt: skip
"""Words before `token` that mean a text token, not one of a service: `pad_token`."""


@lru_cache(maxsize=1024)
def _is_secret(name: str) -> bool:
    if name in ("PWD", "OLDPWD"):  # a shell's working folder
        return False
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    lower = [word.lower() for word in words]
    if not lower:
        return False
    whole = "".join(lower)
    if "secret" in whole or "password" in whole:
        return True
    if lower[-1] == "token" and len(lower) > 1 and lower[-2] in _NO_SECRET_TOKENS:
        return False
    return lower[-1] in _SECRET_WORDS or whole.endswith(_SECRET_ENDINGS)


def _is_webhook_name(name: str) -> bool:
    return "webhook" in name.rpartition(".")[2].lower()


def _name_of(key: object, item: object, around: str) -> str:
    """The name that decides whether an item of a mapping is a secret: its own key, or the key of the mapping."""
    is_url = isinstance(item, str) and "://" in item
    return around if is_secret_name(around) or (is_url and _is_webhook_name(around)) else str(key)


def _redacted(value: Any, name: str, redact_text: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {
            redact_text(key) if isinstance(key, str) else key: _redacted(item, _name_of(key, item, name), redact_text)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [_redacted(item, name, redact_text) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, str):
        return redact_value(value, name, redact_text)
    if isinstance(value, int | float) and not isinstance(value, bool) and is_secret_name(name):
        return HIDDEN
    return value


def redact_value(text: str, name: str = "", redact_text: Callable[[str], str] = redact) -> str:
    """Redact a text value of the key `name`. The whole text may be a URL, even if it contains spaces."""
    if is_secret_name(name):
        return text if _PLACEHOLDER.fullmatch(text.strip()) else HIDDEN
    if _is_webhook_name(name):
        return redact_webhook(text) if text.strip() else text
    scheme, sign, rest = text.partition("://")
    if sign and _SCHEME.fullmatch(scheme) and "@" in rest:
        text = f"{scheme}{sign}{_redact_url(rest)}"
    return redact_text(text)


# -- known secrets ----------------------------------------------------------------------------------------------------


class Redactor:
    """Hides the secrets it has learned, and everything that `redact` recognizes."""

    def __init__(self, *sources: Any) -> None:
        """The arguments are those of `learn`."""
        self._cuts: set[str] = set()
        """All substrings of `LONGEST_CUT` characters of the long secrets."""
        self._short: dict[str, set[str]] = {}
        """Shorter secrets, by their first `SHORTEST` characters."""
        self.learn(*sources)

    def learn(self, *sources: Any) -> None:
        """Learn every secret in these mappings, lists and texts."""
        for secret in {form for source in sources for one in _secrets_in(source, "") for form in _spellings(one)}:
            if len(secret) < LONGEST_CUT:
                self._short.setdefault(secret[:SHORTEST], set()).add(secret)
            else:
                self._cuts.update(secret[at : at + LONGEST_CUT] for at in range(len(secret) - LONGEST_CUT + 1))

    def merge(self, other: Redactor) -> None:
        """Learn all secrets of another redactor."""
        self._cuts |= other._cuts
        for start, secrets in other._short.items():
            self._short.setdefault(start, set()).update(secrets)

    def redact(self, text: str) -> str:
        return redact(self._without_known(text))

    def redact_values(self, value: Any, name: str = "") -> Any:
        return _redacted(value, name, self.redact)

    def _without_known(self, text: str) -> str:
        """Hide all known secrets in one pass over the text, however many there are."""
        if not self._cuts and not self._short:
            return text
        parts: list[str] = []
        kept = at = 0
        while at + SHORTEST <= len(text):
            end = self._end_of_secret(text, at)
            if end > at:
                parts += [text[kept:at], HIDDEN]
                kept = end
            at = max(end, at + 1)
        return "".join([*parts, text[kept:]]) if parts else text

    def _end_of_secret(self, text: str, at: int) -> int:
        """The end of a secret that begins at `at`; `at` itself if none does."""
        end = at
        if text[at : at + LONGEST_CUT] in self._cuts:
            end = at + LONGEST_CUT
            # Extend the match by one character as long as its last LONGEST_CUT characters occur in a secret.
            while text[end - LONGEST_CUT + 1 : end + 1] in self._cuts:
                end += 1
        for secret in self._short.get(text[at : at + SHORTEST], ()):
            if text.startswith(secret, at):
                end = max(end, at + len(secret))
        return end


def _spellings(secret: str) -> Iterator[str]:
    """The secret itself, and as it appears in URLs, in JSON and in a Python repr."""
    forms = (secret, unquote(secret), quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1])
    yield from {form for form in forms if len(form) >= SHORTEST and form != HIDDEN}


def _secrets_in(value: Any, name: str) -> Iterator[str]:
    """All secrets in nested data; `name` is the key of the value. The functions below search one text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets_in(item, _name_of(key, item, name))
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _secrets_in(item, name)
    elif isinstance(value, str):
        yield from _secrets_in_text(value, name)
    elif isinstance(value, int | float) and not isinstance(value, bool) and is_secret_name(name):
        yield str(value)


def _secrets_in_text(text: str, name: str) -> Iterator[str]:
    if is_secret_name(name):
        if not _PLACEHOLDER.fullmatch(text.strip()):
            yield text.strip()
        return
    if _is_webhook_name(name):
        yield from _secrets_in_webhook(text)
    if "://" in text:
        scheme, _, rest = text.partition("://")
        whole = [rest] if _SCHEME.fullmatch(scheme) else []
        for rest in (*whole, *(found[1] for found in _URL.finditer(text))):
            if _MAY_HOLD_SECRET.search(rest):
                first, *chained = _CHAINED.split(rest)
                for url in (first, *(inner.partition("://")[2] for inner in chained)):
                    yield from _secrets_in_url(url)
    if "@" in text and ":" in text:
        yield from (password for *_, password in _remote_logins(text))
    if _MAY_NAME_SECRET.search(text):
        for found in (*_PAIR.finditer(text), *_FLAG.finditer(text)):
            if _holds_secret(found):
                yield found[3].strip("\"'")


def _secrets_in_url(rest: str) -> Iterator[str]:
    login, address = _split_login(rest)
    user, sign, password = login.partition(":")
    if login:
        yield password if sign else user
    _, path, query, fragment = _split_address(address)
    if _HOOK.search(address):
        yield from _long_parts(path)
    for pair in (*query.split("&"), *fragment.split("&")):
        key, _, value = pair.partition("=")
        if is_secret_name(key) or len(value) >= 2 * LONGEST_CUT:
            yield value


def _secrets_in_webhook(url: str) -> Iterator[str]:
    _, sign, rest = url.strip().partition("://")
    if not sign:
        yield url.strip()
        return
    yield from _secrets_in_url(rest)
    _, path, query, fragment = _split_address(_split_login(rest)[1])
    yield (path + (f"?{query}" if query else "") + fragment).strip("/")
    yield from _long_parts(path)
    yield from (pair.partition("=")[2] for pair in query.split("&"))


def _long_parts(path: str) -> Iterable[str]:
    """The parts of a path that look like secrets: eight characters or more, and not a lowercase word."""
    return (part for part in path.split("/") if len(part) >= 8 and not (part.isalpha() and part.islower()))
