"""Which entries the processes of a run have made: with `persistent_cache: false` its clean end removes them all, also
those of processes that were killed.

A file for each rank in the run's folder, `.gracetune-made-<rank>.jsonl`. A line is written before the entries that it
names: {"store": "/cache/text", "keys": ["0f…", …]}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from gracetune.cache.errors import CacheError
from gracetune.cache.folder import FORMAT_FILE
from gracetune.cache.keys import Key
from gracetune.cache.store import DiskStore
from gracetune.storage.append import LineFile

_NAME = re.compile(r"\.gracetune-made-\d+\.jsonl")
_KEY = re.compile(r"[0-9a-f]{32}")

Made = Mapping[Path, Collection[Key]]
"""Keys by store."""


class MadeEntries:
    """The record of one run, written by one of its ranks."""

    def __init__(self, folder: Path, rank: int) -> None:
        """`folder` is the run's. Nothing is made there before the first entry is."""
        self._folder, self._file = folder.absolute(), folder.absolute() / f".gracetune-made-{rank}.jsonl"

    def note(self, store: Path, keys: Collection[Key]) -> None:
        """These are about to be written. Safe for several threads."""
        line = json.dumps({"store": str(store), "keys": sorted(keys)})
        with suppress(OSError):  # of a full disk, say: then some entries may stay, and that is all
            file = LineFile(self._file)
            try:
                file.write(f"{line}\n".encode())
            finally:
                file.close()

    def take_over(self) -> dict[Path, set[Key]]:
        """What earlier processes of this run made and is still there; the record names nothing else from here on.

        For one rank, before any other writes.
        """
        found: dict[Path, set[Key]] = {}
        for file in self._files():
            for store, keys in _lines(file):
                found.setdefault(store, set()).update(keys)
        there = {store: kept for store, keys in found.items() if (kept := _present(store, keys))}
        self.forget()
        for store, keys in there.items():
            self.note(store, keys)
        return there

    def forget(self) -> None:
        """Entries that were made so far are not this run's to remove, or are removed."""
        for file in self._files():
            with suppress(OSError):
                file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        try:
            return [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        except OSError:  # a new run, or one that finds out itself what is wrong with its folder
            return []


def _lines(file: Path) -> Iterator[tuple[Path, set[Key]]]:
    """Those that are whole."""
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
        return {*keys}  # it cannot be read now: whoever removes them says why
