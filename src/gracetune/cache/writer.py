"""The writer of a disk store. It buffers entries and writes them as one shard, atomically."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from gracetune.cache.errors import CacheError
from gracetune.cache.keys import EntryOrigin, Key
from gracetune.cache.shards import Packed, pack
from gracetune.units import MIB

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry
    from gracetune.cache.store import DiskStore


@dataclass(frozen=True)
class Flush:
    """When a writer flushes. A killed process loses at most the entries added since the last flush."""

    entries: int = 1024
    size: int = 64 * MIB
    """Bytes of the buffered entries."""
    seconds: float = 10.0
    """Age of the oldest buffered entry; checked when an entry is added."""


class Writer:
    """Adds entries to a store. Created by `DiskStore.writer`. Thread-safe.

    Leaving the `with` block flushes, also after an error that is not a CacheError.
    """

    def __init__(self, store: DiskStore, limit: Flush) -> None:
        self._store = store
        self._limit = limit
        self._buffered: dict[Key, Packed] = {}
        self._size = 0
        self._oldest = 0.0
        self._mutex = threading.Lock()
        self.added = 0
        """Number of entries accepted. Entries that already existed do not count."""

    def add(self, origin: EntryOrigin, entry: Entry, note: str = "", *, key: Key | None = None) -> Key:
        """Add a copy of `entry`. An existing entry with the same key is kept. Raises CacheFullError, CacheError.

        `note` names the source of an imported entry; audits count such entries. `key` saves computing `origin.key`
        again if the caller knows it.
        After an error the entry stays in the buffer, so `flush` can be called again when the disk has space.
        """
        key = key or origin.key
        with self._mutex:
            if key in self._buffered or key in self._store:
                return key
            packed = pack(key, origin, entry, note)
            if not self._buffered:
                self._oldest = time.monotonic()
            self._buffered[key] = packed
            self._size += packed.layout.size
            self.added += 1
            if self._is_due():
                self._flush()
        return key

    def _is_due(self) -> bool:
        limit = self._limit
        full = len(self._buffered) >= limit.entries or self._size >= limit.size
        return full or time.monotonic() - self._oldest >= limit.seconds

    def flush(self) -> int:
        """Write all buffered entries to disk. Returns their number."""
        with self._mutex:
            return self._flush()

    def _flush(self) -> int:
        if not self._buffered:
            return 0
        self._store.before_writing(self._store.folder, self._buffered.keys())
        self._store.add_shard([*self._buffered.values()])
        count = len(self._buffered)
        self._store.note_created(self._buffered)
        self._buffered, self._size = {}, 0
        return count

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.flush()
            self._store.save_index_if_worth_it()
        elif not isinstance(error, CacheError):  # entries encoded before an unrelated error are valid: keep them
            try:
                self.flush()
            except CacheError as second:
                error.add_note(f"the last {len(self._buffered)} entries could not be written either: {second}")
