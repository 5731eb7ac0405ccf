"""Moves credentials in a dataset's web URL to its `storage` section when a config is read. URLs of other protocols and
chained ones are left alone.

The URL then only says where the data is. `gracetune.redaction` hides the fields of `storage` in everything that is
shown, logged or saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def without_url_credentials(dataset: Any) -> Any:
    """Return a dataset's values with the credentials of its URL moved to `storage`."""
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
    """Split a web URL into the URL without credentials, and the credentials by their names in `storage`."""
    if not address.startswith(("http://", "https://")):
        return address, {}
    found: dict[str, str] = {}
    rest, mark, query = address.partition("?")
    if mark and query:
        found["signature"] = query
    scheme, _, behind = rest.partition("://")
    host, slash, folder = behind.partition("/")
    user_info, at, host = host.rpartition("@")
    if at:
        user, colon, password = user_info.partition(":")
        if not colon:  # a token instead of a name and a password
            user, password = "", user
        found |= {name: unquote(value) for name, value in (("user", user), ("password", password)) if value}
    return f"{scheme}://{host}{slash}{folder}", found
