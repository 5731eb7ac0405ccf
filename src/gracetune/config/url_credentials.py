"""Credentials in the address of a dataset: moved to `storage` when a config is read, so that the address says only
where the data are. What is shown, logged or saved hides them (`gracetune.redaction`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def without_url_credentials(dataset: Any) -> Any:
    """A dataset's values with the credentials of its address moved to `storage`."""
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
        found["signature"] = query
    scheme, _, behind = rest.partition("://")
    host, slash, folder = behind.partition("/")
    user_info, at, host = host.rpartition("@")
    if at:
        user, colon, password = user_info.partition(":")
        if not colon:  # a token in the place of the name
            user, password = "", user
        found |= {name: unquote(value) for name, value in (("user", user), ("password", password)) if value}
    return f"{scheme}://{host}{slash}{folder}", found
