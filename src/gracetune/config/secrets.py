"""Credentials: taken out of addresses when a config is read, and out of every text that may be shown or stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

HIDDEN: Final = "***"
_USER_INFO = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*://)(?P<user>[^/@\s'\"]*)@")
_QUERY = re.compile(r"(?P<address>https?://[^\s?#'\"<>]+)\?[^\s'\"<>)]*")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{10,}\b|\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b")
_NAMED = re.compile(
    r"(?i)\b(?P<name>authorization|x-amz-[\w-]*|aws_[\w]*key[\w]*|secret[\w]*|session_?token|password|signature)"
    r"(?P<between>['\"]?\s*[:=]\s*['\"]?(?:bearer\s+)?)(?P<value>[^\s'\",;&]+)"
)


def hide_credentials(text: str) -> str:
    """The text without what could be a credential: for everything that other programs say about an address."""
    text = _USER_INFO.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _QUERY.sub(rf"\g<address>?{HIDDEN}", text)
    text = _NAMED.sub(rf"\g<name>\g<between>{HIDDEN}", text)
    return _TOKEN.sub(HIDDEN, text)


def without_url_secrets(dataset: Any) -> Any:
    """A dataset's values with the credentials of its address moved to `storage`, where they are kept as secrets."""
    if not isinstance(dataset, Mapping):
        return dataset
    path, storage = dataset.get("path"), dataset.get("storage")
    if not isinstance(path, str) or not (storage is None or isinstance(storage, Mapping)):
        return dataset
    address, found = split_address(path)
    if not found:
        return dataset
    return {**dataset, "path": address, "storage": {**found, **(storage or {})}}


def split_address(address: str) -> tuple[str, dict[str, str]]:
    """A web address without its credentials, and these by their names in `storage`."""
    if not address.startswith(("http://", "https://")):
        return address, {}
    found: dict[str, str] = {}
    rest, mark, query = address.partition("?")
    if mark and query:
        found["query"] = query
    scheme, _, behind = rest.partition("://")
    host, slash, folder = behind.partition("/")
    user_info, at, host = host.rpartition("@")
    if at:
        user, _, password = user_info.partition(":")
        found |= {name: unquote(value) for name, value in (("user", user), ("password", password)) if value}
    return f"{scheme}://{host}{slash}{folder}", found
