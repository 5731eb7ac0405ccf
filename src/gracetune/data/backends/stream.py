"""Seekable streams over memory, without a copy."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class _Memory(io.RawIOBase):
    """A raw stream over a memoryview. `io.BytesIO` would copy the whole view first."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        target = memoryview(buffer).cast("B")
        data = self._view[self._at : self._at + len(target)]
        target[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        if start + offset < 0:
            raise ValueError(f"seek to {start + offset}, before the start of the file")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._view = memoryview(b"")  # drops the reference, so that the memory can be freed
        super().close()


def stream_over(view: memoryview) -> BinaryIO:
    """A seekable stream over the view."""
    whole = whole_bytes(view)
    return io.BufferedReader(_Memory(view)) if whole is None else io.BytesIO(whole)


def whole_bytes(view: memoryview) -> bytes | None:
    """The bytes object behind a view that covers all of it; None for other memory or a part of a bytes object.

    `io.BytesIO` uses bytes without a copy, and its methods are many times faster than those of a Python class.
    """
    found = view.obj
    return found if isinstance(found, bytes) and view.c_contiguous and view.nbytes == len(found) else None
