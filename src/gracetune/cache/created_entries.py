"""A record of the entries that the processes of a run have made.

With `persistent_cache: false` a run removes them at its clean end, including those of earlier processes of the run that
were killed. Each rank writes a file in the run's folder, `.gracetune-made-<rank>.jsonl`. A line is written before the
entries that it lists: {"store": "/cache/text", "keys": ["0f…", …]}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from gracetune.cache.errors import CacheError
from gracetune.cache.folders import FORMAT_FILE
from gracetune.cache.keys import Key
from gracetune.cache.store import DiskStore
from gracetune.storage.atomic import LineFile

_NAME = re.compile(r"\.gracetune-made-\d+\.jsonl")
_KEY = re.compile(r"[0-9a-f]{32}")

Made = Mapping[Path, Collection[Key]]
"""Keys by store."""


class CreatedEntries:
    """The record of one run, as one of its ranks writes it."""

    def __init__(self, folder: Path, rank: int) -> None:
        """`folder` is the run's. The file is created before the first entry is written."""
        self._folder, self._file = folder.absolute(), folder.absolute() / f".gracetune-made-{rank}.jsonl"

    def note(self, store: Path, keys: Collection[Key]) -> None:
        """Record entries that are about to be written. Thread-safe."""
        line = json.dumps({"store": str(store), "keys": sorted(keys)})
        with suppress(OSError):  # e.g. a full disk; the only consequence is that some entries may not be removed
            file = LineFile(self._file)
            try:
                file.write(f"{line}\n".encode())
            finally:
                file.close()

    def take_over(self) -> dict[Path, set[Key]]:
        """The entries that earlier processes of this run made and that still exist.

        Rewrites the record, so that it has only these. Call this on one rank, before any rank writes.
        """
        recorded: dict[Path, set[Key]] = {}
        for file in self._files():
            for store, keys in _lines(file):
                recorded.setdefault(store, set()).update(keys)
        existing = {store: kept for store, keys in recorded.items() if (kept := _present(store, keys))}
        self.forget()
        for store, keys in existing.items():
            self.note(store, keys)
        return existing

    def forget(self) -> None:
        """Delete the record: the entries were removed, or this run must not remove them."""
        for file in self._files():
            with suppress(OSError):
                file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        try:
            return [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        except OSError:  # a new run; if the folder is broken, the run reports that itself
            return []


def _lines(file: Path) -> Iterator[tuple[Path, set[Key]]]:
    """The valid lines of a file. A killed process may leave an incomplete one."""
    try:
        text = file.read_bytes()
    except OSError:
        return
    for line in text.splitlines():
        try:
            found = json.loads(line)
            store, keys = Path(found["store"]), {Key(key) for key in found["keys"] if _KEY.fullmatch(key)}
        except (ValueError, TypeError, KeyError):
            continue
        yield store, keys


def _present(store: Path, keys: Collection[Key]) -> set[Key]:
    try:
        if not (store / FORMAT_FILE).exists():
            return set()
        with DiskStore.open(store, writable=False) as opened:
            return {*opened.find([*keys]).present}
    except (CacheError, OSError):
        return {*keys}  # keep them in the record; removing them later will report the problem
