"""Datasets that are lists of URLs. Each URL is fetched separately. Dead ones are common and are only counted."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from gracetune.data.backends.errors import StorageError
from gracetune.data.backends.url_access import error_types, is_final, words
from gracetune.data.copies.folder import CopyFolder, FinishedPart
from gracetune.data.copies.layout import UNPACKED, media_column
from gracetune.data.copies.rows import FILE_NAME, media_extension, passes
from gracetune.data.copies.sources import open_file
from gracetune.data.copies.tables import Address, read_addresses
from gracetune.data.media import Kind
from gracetune.redaction import redact
from gracetune.storage.atomic import LineFile, write_file

if TYPE_CHECKING:
    from gracetune.data.copies.plan import CopyPlan

AT_ONCE: Final = 16
_ATTEMPTS = 3


def fetch_addresses(plan: CopyPlan, journal: LineFile, folder: CopyFolder, kind: Kind) -> None:
    """Fetch all missing URLs, with one journal line for each. The next start retries those that failed."""
    table = plan.layout.parts[0].path
    with plan.source.explained(), open_file(plan.source, table) as file:
        data = file.read()
    addresses = read_addresses(plan.dataset.id, data, table, media_column(plan.dataset, plan.options))
    chosen = [address for address in addresses if passes(address.row, plan.options.filter)]
    done = {name for name, part in folder.finished().items() if part.samples and folder.has_part(part)}
    missing = [address for address in chosen if _key(address) not in done]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="addresses") as pool:
        for part in pool.map(lambda address: _fetch(address, folder, kind), missing):
            journal.write(part.model_dump_json().encode() + b"\n")


def _fetch(address: Address, folder: CopyFolder, kind: Kind) -> FinishedPart:
    key, protocol = _key(address), address.url.partition("://")[0]
    try:
        data = _read(address.url, protocol)
    except StorageError as error:
        return _left_out(key, f"a URL that cannot be opened: {str(error)[:80]}")
    except error_types([protocol]) as error:
        return _left_out(key, f"a URL that cannot be read: {words(error)[:80]}")
    extension = media_extension(data, kind)
    if extension is None:
        return _left_out(key, f"a URL without {kind} content")
    at = f"{UNPACKED}/{key}.{extension}"
    path = folder.data / at
    path.parent.mkdir(parents=True, exist_ok=True)
    # The row first: a file in the copy always has its row.
    line = json.dumps({**address.row, FILE_NAME: at}, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
    write_file(path.with_name(f".{path.name}.jsonl"), line)
    write_file(path, data)
    return FinishedPart(part=key, size=len(data), digest=None, tag=None, at=at, files=1, bytes=len(data), samples=1,
                        columns=(*address.row, FILE_NAME))  # fmt: skip


def _read(url: str, protocol: str) -> bytes:
    import fsspec  # type: ignore[import-untyped]

    try:
        fs, name = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise StorageError(redact(str(error))) from error
    for attempt in range(_ATTEMPTS):
        try:
            data: bytes = fs.cat_file(name)
        except error_types([protocol]) as error:
            if is_final(error) or attempt + 1 == _ATTEMPTS:
                raise
        else:
            return data
    raise StorageError("no answer")


def _key(address: Address) -> str:
    """A file name for an address: the number of its row and the name in the URL."""
    stem = PurePosixPath(unquote(urlsplit(address.url).path)).stem[:60]
    safe = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in stem)
    return f"{address.number:07d}-{safe}" if safe else f"{address.number:07d}"


def _left_out(key: str, reason: str) -> FinishedPart:
    left: dict[str, Any] = {reason: 1}
    return FinishedPart(part=key, size=None, digest=None, tag=None, at=key, files=0, bytes=0, samples=0, left_out=left)
