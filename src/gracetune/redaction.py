"""Secrets in text: the one rule about what may leave the process, whatever it leaves by.

redact("https://me:secret@host/data")          # https://(hidden)@host/data
redact_values({"hub_token": "hf_abc"})         # {"hub_token": "(hidden)"}

Secrets are recognised by where they stand and how they look: what stands before the `@` of a URL, and behind its `?`;
the login of `user:password@host:/path`;
the address of a webhook, but for its host; values under a name such as `hub_token` or `WANDB_API_KEY`; tokens of known
services. A `Redactor` also learns the secrets of a configuration and of the environment, and hides them wherever they
turn up: in the message of a library, cut in half, or escaped.

Values that are used are never changed: only what is shown, logged or saved for others goes through here.
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
"""Characters of a secret that is hidden wherever it turns up. A shorter one is hidden where it stands: it may be part
of any word."""
LONGEST_CUT: Final = 12
"""So many characters in a row of a longer secret are hidden too: messages cut long values."""


def redact(text: str) -> str:
    """The text without what is recognisable as a secret."""
    text = _TOKEN.sub(HIDDEN, text)
    if "://" in text:
        text = _URL.sub(lambda found: f"://{_shown_rest(found[1])}", text)
    if ":/" in text and "@" in text:
        text = _URL_AS_PATH.sub(rf"\1{HIDDEN}@", text)
    if "@" in text and ":" in text:
        text = _without_remote_logins(text)
    if _MAY_NAME_SECRET.search(text):
        text = _PAIR.sub(_shown_pair, text)
        text = _FLAG.sub(_shown_pair, text)
    return text


def redact_values(value: Any, name: str = "") -> Any:
    """The same of nested data, in which a key says what its value is. Keys are text too."""
    return _redacted(value, name, redact)


def is_secret_name(name: str) -> bool:
    """Whether a key, an option or a variable of this name holds a secret: `hub_token`, `datasets[0].aws_secret_key`."""
    return _is_secret(name[-200:].rpartition(".")[2])


# -- URLs -------------------------------------------------------------------------------------------------------------

_URL: Final = re.compile(r"""://([^\s"'<>`\\]+)""")
_URL_AS_PATH: Final = re.compile(r"""\b([A-Za-z][A-Za-z0-9+.-]{1,30}:/)[^/\s"'<>`\\]+@""")
"""`https:/me:secret@host`: `pathlib` makes one slash of two. A drive has one letter."""
_CHAINED: Final = re.compile(r"(?=::[A-Za-z0-9+.-]{1,30}://)")
_SCHEME: Final = re.compile(r"\s*[A-Za-z0-9+.:-]{1,60}")
"""Of a text that is a URL and nothing else, also of one that fsspec chains."""
_END: Final = re.compile(r"[/?#]")
_HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.%]*\]|[^:\[\]]*)(?::\d*)?\Z")
_HOOK: Final = re.compile(r"hook|/bot\d+:", re.IGNORECASE)
_TELLING: Final = re.compile(r"[@?#]|hook|/bot\d+:", re.IGNORECASE)
"""What no URL without a secret needs."""


def _shown_rest(rest: str) -> str:
    """What follows `://`. fsspec chains URLs: `zip://inside.zip::https://host/outside.zip`."""
    first, *chained = _CHAINED.split(rest) if "://" in rest else [rest]
    shown = [_shown_address(first)]
    for one in chained:
        scheme, sign, address = one.partition("://")
        shown.append(f"{scheme}{sign}{_shown_address(address)}")
    return "".join(shown)


def _shown_address(rest: str) -> str:
    login, address = _split_login(rest)
    host, path, query, fragment = _split_address(address)
    if path.strip("/") and _HOOK.search(host + path):
        path = f"/{HIDDEN}"
    query = f"?{HIDDEN}" if query else ""
    fragment = f"#{HIDDEN}" if "=" in fragment else fragment
    return f"{f'{HIDDEN}@' if login else ''}{host}{path}{query}{fragment}"


def _split_login(rest: str) -> tuple[str, str]:
    """Name and password, and the address behind the `@`. A password may hold a slash that should have been escaped."""
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
    before, sign, fragment = address.partition("#")
    before, _, query = before.partition("?")
    host, slash, path = before.partition("/")
    return host, slash + path, query, sign + fragment


_REMOTE_HOST: Final = re.compile(
    r"""@(?!sha\d+:)(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}+)|\[[0-9A-Fa-f:.%]{2,60}+\]):(?=[^\s"'<>`\\@])"""
)
"""`@host:`, as scp and rsync write it. A container image's `@sha256:` is a digest."""
_REMOTE_LOGIN: Final = re.compile(r"""(?<![^\s"'<>`\\=(,;/])([^\s"'<>`\\=(,;/:@]{1,64}):([^\s"'<>`\\]{1,256})\Z""")
"""`user:password`. What it ends with is the text before the `@`."""
_LONGEST_LOGIN: Final = 330


def _remote_logins(text: str) -> Iterator[tuple[int, int, str]]:
    """`user:password@host:/path`, as scp and rsync write it: where each login begins and ends, and its password."""
    done = 0
    for found in _REMOTE_HOST.finditer(text):
        at = found.start()
        first = max(done, at - _LONGEST_LOGIN)
        login = _REMOTE_LOGIN.search(text[first:at])
        if login is not None and "://" not in login[0] and not login[2].endswith(HIDDEN):
            yield first + login.start(), at, login[2]
        done = at + 1


def _without_remote_logins(text: str) -> str:
    pieces, kept = [], 0
    for begin, end, _ in _remote_logins(text):
        pieces += [text[kept:begin], HIDDEN]
        kept = end
    return "".join([*pieces, text[kept:]]) if pieces else text


def redact_webhook(url: str) -> str:
    """Only the host: the rest of the address is its password."""
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
"""Quoted or not. What follows a closing quote in JSON is no value in quotes; no bracket or escape is taken apart."""
_PAIR: Final = re.compile(rf"""(?<![\w.-])([\w.-]{{1,80}}+)(["']?\ {{0,3}}[=:]\ {{0,3}}){_VALUE}""")
"""`NAME=value`, `"name": "value"`, `--name=value`."""
_FLAG: Final = re.compile(rf"(?<![\w.-])(--[\w.-]{{1,80}}+)(\ {{1,3}}){_VALUE}")
_PLACEHOLDER: Final = re.compile(r"""["']?(?:[.…<>*-]*|\$\{?\w+\}?|\(hidden\)?|null|true|false|None|True|False)["']?""")
_TOKEN: Final = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[opsu]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bAKIA[0-9A-Z]{16}|\bxox[a-z]-[\w-]{10,}|\bglpat-[\w-]{16,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|(?<=\bBearer )[\w.~+/=-]{16,}|(?<=\bBasic )[\w.~+/=-]{16,}"
)
"""Of Hugging Face, OpenAI, GitHub, AWS, Slack, GitLab; JSON Web Tokens; headers."""


def _holds_secret(found: re.Match[str]) -> bool:
    """Whether a pair in a text has a secret for its value. `a token: gold, worn` is a sentence."""
    name, sign, value = found[1], found[2], found[3]
    is_sentence = name.lower() in _ALSO_IN_PROSE and sign.startswith(": ") and _WORD.fullmatch(value) is not None
    return is_secret_name(name) and not is_sentence and not _PLACEHOLDER.fullmatch(value)


def _shown_pair(found: re.Match[str]) -> str:
    name, sign, value = found[1], found[2], found[3]
    if not _holds_secret(found) or value.startswith(HIDDEN[:-1]):
        return found[0]
    mark = value[0] if value[0] in "\"'" else ""
    return f"{name}{sign}{mark}{HIDDEN}{mark}"


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
"""`pad_token` and its like: tokens of a text, not of a service."""


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
    """What says whether an item of a mapping is a secret: its key, or that of the mapping."""
    is_url = isinstance(item, str) and "://" in item
    return around if is_secret_name(around) or (is_url and _is_webhook_name(around)) else str(key)


def _redacted(value: Any, name: str, shown: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {
            shown(key) if isinstance(key, str) else key: _redacted(item, _name_of(key, item, name), shown)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [_redacted(item, name, shown) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, str):
        return redact_value(value, name, shown)
    if isinstance(value, int | float) and not isinstance(value, bool) and is_secret_name(name):
        return HIDDEN
    return value


def redact_value(text: str, name: str = "", shown: Callable[[str], str] = redact) -> str:
    """One text that is a value, of the key `name`. All of it may be one URL, whatever characters it has."""
    if is_secret_name(name):
        return HIDDEN if text.strip() and not _PLACEHOLDER.fullmatch(text) else text
    if _is_webhook_name(name):
        return redact_webhook(text) if text.strip() else text
    scheme, sign, rest = text.partition("://")
    if sign and _SCHEME.fullmatch(scheme) and "@" in rest:
        text = f"{scheme}{sign}{_shown_rest(rest)}"
    return shown(text)


# -- secrets that are known -------------------------------------------------------------------------------------------


class Redactor:
    """Hides the secrets it has learnt, and what is recognisable as one."""

    def __init__(self, *sources: Any) -> None:
        """As `learn`."""
        self._cuts: set[str] = set()
        """All pieces of `LONGEST_CUT` characters that occur in secrets."""
        self._short: dict[str, set[str]] = {}
        """Secrets that are shorter than that, by their first `SHORTEST` characters."""
        self.learn(*sources)

    def learn(self, *sources: Any) -> None:
        """Every secret in these mappings, lists and texts."""
        for secret in {form for source in sources for one in _secrets(source, "") for form in _forms(one)}:
            if len(secret) < LONGEST_CUT:
                self._short.setdefault(secret[:SHORTEST], set()).add(secret)
            else:
                self._cuts.update(secret[at : at + LONGEST_CUT] for at in range(len(secret) - LONGEST_CUT + 1))

    def merge(self, other: Redactor) -> None:
        """Learn what another one knows."""
        self._cuts |= other._cuts
        for start, secrets in other._short.items():
            self._short.setdefault(start, set()).update(secrets)

    def redact(self, text: str) -> str:
        return redact(self._without_known(text))

    def redact_values(self, value: Any, name: str = "") -> Any:
        return _redacted(value, name, self.redact)

    def _without_known(self, text: str) -> str:
        """In one pass, however many there are."""
        if not self._cuts and not self._short:
            return text
        pieces: list[str] = []
        kept = at = 0
        while at + SHORTEST <= len(text):
            end = self._end_of_secret(text, at)
            if end > at:
                pieces += [text[kept:at], HIDDEN]
                kept = end
            at = max(end, at + 1)
        return "".join([*pieces, text[kept:]]) if pieces else text

    def _end_of_secret(self, text: str, at: int) -> int:
        """Where one ends that begins here; `at` where none does."""
        end = at
        if text[at : at + LONGEST_CUT] in self._cuts:
            end = at + LONGEST_CUT
            while text[end - LONGEST_CUT + 1 : end + 1] in self._cuts:
                end += 1
        for secret in self._short.get(text[at : at + SHORTEST], ()):
            if text.startswith(secret, at):
                end = max(end, at + len(secret))
        return end


def _forms(secret: str) -> Iterator[str]:
    """As it is, and as URLs, JSON and Python write it."""
    forms = (secret, unquote(secret), quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1])
    yield from {form for form in forms if len(form) >= SHORTEST and form != HIDDEN}


def _secrets(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets(item, _name_of(key, item, name))
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _secrets(item, name)
    elif isinstance(value, str):
        yield from _of_text(value, name)
    elif isinstance(value, int | float) and not isinstance(value, bool) and is_secret_name(name):
        yield str(value)


def _of_text(text: str, name: str) -> Iterator[str]:
    if is_secret_name(name):
        yield text.strip()
        return
    if _is_webhook_name(name):
        yield from _of_webhook(text)
    if "://" in text:
        scheme, _, rest = text.partition("://")
        whole = [rest] if _SCHEME.fullmatch(scheme) else []
        for rest in (*whole, *(found[1] for found in _URL.finditer(text))):
            if _TELLING.search(rest):
                first, *chained = _CHAINED.split(rest)
                for one in (first, *(inner.partition("://")[2] for inner in chained)):
                    yield from _of_url(one)
    if "@" in text and ":" in text:
        yield from (password for *_, password in _remote_logins(text))
    if _MAY_NAME_SECRET.search(text):
        for found in (*_PAIR.finditer(text), *_FLAG.finditer(text)):
            if _holds_secret(found):
                yield found[3].strip("\"'")


def _of_url(rest: str) -> Iterator[str]:
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


def _of_webhook(url: str) -> Iterator[str]:
    _, sign, rest = url.strip().partition("://")
    if not sign:
        yield url.strip()
        return
    yield from _of_url(rest)
    _, path, query, fragment = _split_address(_split_login(rest)[1])
    yield (path + (f"?{query}" if query else "") + fragment).strip("/")
    yield from _long_parts(path)
    yield from (pair.partition("=")[2] for pair in query.split("&"))


def _long_parts(path: str) -> Iterable[str]:
    """Words of a path are no secrets; what is long and no word is."""
    return (part for part in path.split("/") if len(part) >= 8 and not (part.isalpha() and part.islower()))
