"""A file that grows line by line: each line is handed to the kernel whole, so that even kill -9 loses none."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class LineFile:
    """The file may be there from an earlier process. It is flushed to disk when it is closed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")  # a killed process left its last line torn

    def write(self, line: bytes) -> None:
        """With its newline."""
        while line:  # one call, except on a disk that is nearly full
            line = line[os.write(self._descriptor, line) :]

    def close(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a pipe or a device
                raise
        finally:
            os.close(self._descriptor)
