"""Who encodes what, when several processes build one cache: an entry belongs to whoever locks its key.

Ranks of one run and commands that know nothing of each other share work the same way. A claim is a lock of one byte of
`work.lock`, at the place the key says: the kernel lets go of it when its process ends, however it ends, so work of a
process that was killed is free at once and there is nothing to clean up. Fast ranks simply claim more.

Claims save work and decide nothing else. On a disk without locks everyone may take everything, and an entry that two
processes encoded is the same in both.
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
    """One process's claims on the entries of one store. Between threads of one process they exclude nobody."""

    def __init__(self, store: DiskStore) -> None:
        self._folder = store.folder
        try:
            self._descriptor = open_lock_file(store.folder / "work.lock")
        except OSError as error:
            raise unwritable(error, store.folder, needed=0, free=None) from error
        self._held: set[Key] = set()
        self.are_exclusive = True
        """False once this disk turned out to have no locks."""

    def take(self, key: Key) -> bool:
        try:
            grip = lock_byte(self._descriptor, _place(key))
        except OSError as error:
            raise unwritable(error, self._folder, needed=0, free=None) from error
        if grip == "busy":
            return False
        if grip == "unsupported":
            self.are_exclusive = False
        self._held.add(key)
        return True

    def release(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._held.discard(key)
            if self.are_exclusive:
                with suppress(OSError):  # closing the file lets go of it too
                    unlock_byte(self._descriptor, _place(key))

    def close(self) -> None:
        os.close(self._descriptor)  # which lets go of all of them
        self._held.clear()

    def __enter__(self) -> Claims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _place(key: Key) -> int:
    """60 bits: two keys at one place would only wait for each other."""
    return int(key[:15], 16)
