"""Append-only line files. Each line goes to the kernel in one write, so even `kill -9` loses no completed line."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


class LineFile:
    """A file opened for appending, which may exist from an earlier process. `close` flushes it to disk."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                # A killed process can leave half a line. End it, so that the next line stays readable.
                os.write(self._descriptor, b"\n")
        except OSError:
            os.close(self._descriptor)
            raise

    def write(self, line: bytes) -> None:
        """Append one line, which must end with a newline. A line that cannot be written whole is removed."""
        rest = line
        try:
            while rest:  # usually one call; the kernel writes less on a disk that is nearly full
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            if len(rest) < len(line):
                with suppress(OSError):
                    size = os.fstat(self._descriptor).st_size
                    os.ftruncate(self._descriptor, size - (len(line) - len(rest)))
            raise

    def close(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # pipes and devices have no fsync
                raise
        finally:
            os.close(self._descriptor)
