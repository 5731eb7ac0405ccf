"""Who encodes what, when several processes build one cache: an entry belongs to whoever locks its key.

Ranks of one run and commands that know nothing of each other share work the same way. A claim is a lock of one byte of
`work.lock`, at the place the key says: the kernel lets go of it when its process ends, however it ends, so work of a
process that was killed is free at once and there is nothing to clean up. Fast ranks simply claim more.

Claims save work and decide nothing else. On a disk without locks everyone may take everything, and an entry that two
processes encoded is the same in both.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable
from types import TracebackType

from gracetune.cache.errors import unwritable
from gracetune.cache.keys import Key
from gracetune.cache.store import DiskStore

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_TAKEN = (errno.EACCES, errno.EAGAIN)


class Claims:
    """One process's claims on the entries of one store. Between threads of one process they exclude nobody."""

    def __init__(self, store: DiskStore) -> None:
        try:
            self._descriptor = os.open(store.folder / "work.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise unwritable(error, store.folder, needed=0, free=None) from error
        self._held: set[Key] = set()
        self.are_exclusive = True
        """False once this disk turned out to have no locks."""

    def take(self, key: Key) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(key))
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            if error.errno not in _NO_LOCKS:
                raise
            self.are_exclusive = False
        self._held.add(key)
        return True

    def release(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._held.discard(key)
            if self.are_exclusive:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _place(key))

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
