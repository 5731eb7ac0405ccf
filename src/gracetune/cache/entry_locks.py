"""Claims divide the work when several processes build one cache: a process encodes the entries whose keys it locked.

The ranks of one run and independent commands share work in the same way. A claim is a lock on one byte of `work.lock`,
at an offset computed from the key. The kernel releases it when its process ends for any reason, so entries claimed by a
killed process are available again at once and nothing has to be cleaned up. Faster ranks claim more.

Claims only avoid duplicate work; correctness does not depend on them. On a file system without locks every claim
succeeds, and two processes that encode the same entry write the same content.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType

from gracetune.cache.errors import unwritable
from gracetune.cache.keys import Key
from gracetune.cache.store import DiskStore
from gracetune.storage.locks import lock_byte, open_lock_file, unlock_byte


class Claims:
    """The claims of one process on entries of one store. They do not exclude other threads of the same process."""

    def __init__(self, store: DiskStore) -> None:
        self._folder = store.folder
        try:
            self._descriptor = open_lock_file(store.folder / "work.lock")
        except OSError as error:
            raise unwritable(error, store.folder, needed=0, free=None) from error
        self._held: set[Key] = set()
        self.are_exclusive = True
        """Becomes False when the file system turns out to have no locks."""

    def take(self, key: Key) -> bool:
        """Claim an entry. Returns False if another process holds it."""
        try:
            result = lock_byte(self._descriptor, _offset(key))
        except OSError as error:
            raise unwritable(error, self._folder, needed=0, free=None) from error
        if result == "busy":
            return False
        if result == "unsupported":
            self.are_exclusive = False
        self._held.add(key)
        return True

    def release(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._held.discard(key)
            if self.are_exclusive:
                with suppress(OSError):  # closing the file will release it
                    unlock_byte(self._descriptor, _offset(key))

    def close(self) -> None:
        os.close(self._descriptor)  # releases all locks
        self._held.clear()

    def __enter__(self) -> Claims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _offset(key: Key) -> int:
    """60 bits of the key fit a signed file offset. Two keys with the same offset would merely exclude each other."""
    return int(key[:15], 16)
