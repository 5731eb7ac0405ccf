"""Append-only line files. Each line goes to the kernel in one write, so even `kill -9` loses no completed line."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class LineFile:
    """A file opened for appending, which may exist from an earlier process. `close` flushes it to disk."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            # A process that ran out of disk space can leave half a line. End it, so that the next line stays readable.
            os.write(self._descriptor, b"\n")

    def write(self, line: bytes) -> None:
        """Append one line, which must end with a newline."""
        while line:  # usually one call; the kernel writes less on a disk that is nearly full
            line = line[os.write(self._descriptor, line) :]

    def close(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # pipes and devices have no fsync
                raise
        finally:
            os.close(self._descriptor)
