"""Adding entries: gathered for a moment, then written as one shard that is complete or absent."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from gracetune.cache.errors import CacheError
from gracetune.cache.keys import Key, Origin
from gracetune.cache.shards import Packed, pack
from gracetune.units import MIB

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry
    from gracetune.cache.store import DiskStore


@dataclass(frozen=True)
class Flush:
    """How much work a killed process may lose: what was added since the last flush, and never more than this."""

    entries: int = 1024
    size: int = 64 * MIB
    seconds: float = 10.0
    """Since the oldest entry that waits; looked at when one is added."""


class Writer:
    """Made by `DiskStore.writer`. Safe for several threads. Leaving the `with` block flushes, after an error too."""

    def __init__(self, store: DiskStore, limit: Flush) -> None:
        self._store = store
        self._limit = limit
        self._waiting: dict[Key, Packed] = {}
        self._size = 0
        self._oldest = 0.0
        self._mutex = threading.Lock()
        self.added = 0
        """Entries taken; those that were there already are not counted."""

    def add(self, origin: Origin, entry: Entry, note: str = "", *, key: Key | None = None) -> Key:
        """Copies the tensors. An entry that is there already is left as it is. CacheFullError, CacheError.

        `note` says where an entry came from that we did not encode ourselves; audits show it. `key` is the origin's,
        where it is known already.
        After such an error the entry waits on: `flush` may be called again once there is room.
        """
        key = key or origin.key
        with self._mutex:
            if key in self._waiting or key in self._store:
                return key
            packed = pack(key, origin, entry, note)
            if not self._waiting:
                self._oldest = time.monotonic()  # never the wall clock: that one may jump
            self._waiting[key] = packed
            self._size += packed.layout.size
            self.added += 1
            if self._is_due():
                self._flush()
        return key

    def _is_due(self) -> bool:
        limit = self._limit
        full = len(self._waiting) >= limit.entries or self._size >= limit.size
        return full or time.monotonic() - self._oldest >= limit.seconds

    def flush(self) -> int:
        """Everything added so far is on disk when this returns; how many entries that were."""
        with self._mutex:
            return self._flush()

    def _flush(self) -> int:
        if not self._waiting:
            return 0
        self._store.before_writing(self._store.folder, self._waiting.keys())
        self._store.add_shard([*self._waiting.values()])
        count = len(self._waiting)
        self._store.note_created(self._waiting)
        self._waiting, self._size = {}, 0
        return count

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.flush()
            self._store.save_index_if_worth_it()
        elif not isinstance(error, CacheError):  # what was encoded before something else went wrong is good work
            try:
                self.flush()
            except CacheError as second:
                error.add_note(f"and the last {len(self._waiting)} entries could not be written: {second}")
