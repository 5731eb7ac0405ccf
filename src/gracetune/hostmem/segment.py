"""Reading segments of staged files. The index is verified once, when the segment is opened.

`segment_writer` describes the format.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress

import cramjam
from pydantic import BaseModel, ConfigDict

from gracetune.hostmem.compression import BY_NUMBER, RAW
from gracetune.hostmem.errors import StagingError
from gracetune.hostmem.segment_writer import (
    CHECKSUM_AT,
    DATA_AT,
    HEADER,
    MAGIC,
    RECORD,
    SEALS,
    VERSION,
    SegmentEntry,
    checksum,
)


class SegmentHandle(BaseModel):
    """A sealed segment as another process can find it: a file descriptor of the process that holds it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    descriptor: int
    inode: int
    size: int
    identity: str


class Segment:
    """A sealed segment, mapped read-only. It owns `file` and closes it, also if the constructor raises.

    Views returned by `read` keep their pages alive after `close`, so nothing is ever unmapped under a reader.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        try:
            self._map: mmap.mmap | None = _mapped(file)
        except BaseException:
            file.close()
            raise
        self._view = memoryview(self._map)
        try:
            self._records, self._names, self.count, self.identity = self._checked_header()
        except BaseException:
            self.close()
            raise

    def _checked_header(self) -> tuple[int, int, int, str]:
        """Verify header and index. Returns the offsets of records and names, the record count and the identity."""
        if len(self._view) < DATA_AT or bytes(self._view[: len(MAGIC)]) != MAGIC:
            raise StagingError("this memory was not staged by gracetune")
        _, version, count, records, names, size, identity = HEADER.unpack_from(self._view)
        if version != VERSION:
            raise StagingError(
                f"staged data of format {version}, expected {VERSION}\n"
                "  try  run the same version of gracetune in all processes"
            )
        sound = DATA_AT <= records <= names <= size == len(self._view) and names - records == count * RECORD.size
        found = self._view[CHECKSUM_AT : CHECKSUM_AT + 16]
        if not sound or checksum(self._view[: HEADER.size], self._view[records:]) != found:
            raise StagingError("the index of the staged data is damaged\n  try  restart the run: it stages again")
        return records, names, count, identity.hex()

    @property
    def size(self) -> int:
        return len(self._view)

    @property
    def resident(self) -> int:
        """Bytes of memory in use: the size without punched holes."""
        return os.fstat(self._file.fileno()).st_blocks * 512  # st_blocks always counts 512-byte units

    def handle(self) -> SegmentHandle:
        descriptor = self._file.fileno()
        inode = os.fstat(descriptor).st_ino
        return SegmentHandle(descriptor=descriptor, inode=inode, size=self.size, identity=self.identity)

    def fileno(self) -> int:
        return self._file.fileno()

    def find(self, path: str) -> SegmentEntry | None:
        name = path.encode()
        position = bisect_left(range(self.count), name, key=self._name)
        if position == self.count or self._name(position) != name:
            return None
        return self.entry(position)

    def __iter__(self) -> Iterator[SegmentEntry]:
        """All entries, sorted by path. Sorting by UTF-8 bytes or by code points gives the same order."""
        return (self.entry(position) for position in range(self.count))

    def entry(self, position: int) -> SegmentEntry:
        _, _, codec, _, offset, stored, size, modified, digest = self._record(position)
        return SegmentEntry(str(self._name(position), "utf-8"), codec, offset, stored, size, modified, digest)

    def _record(self, position: int) -> tuple[int, int, int, int, int, int, int, int, bytes]:
        return RECORD.unpack_from(self._view, self._records + position * RECORD.size)

    def _name(self, position: int) -> bytes:
        start, length = self._record(position)[:2]
        return bytes(self._view[self._names + start : self._names + start + length])

    def read(self, entry: SegmentEntry) -> memoryview:
        """The file's bytes: a view of the segment if they are stored uncompressed, otherwise a decompressed copy."""
        stored = self._stored(entry)
        if entry.codec == RAW:
            return stored
        try:
            return BY_NUMBER[entry.codec].unpack(stored, entry.size)
        except (KeyError, ValueError, cramjam.DecompressionError) as error:
            raise StagingError(f"{entry.path} is damaged in memory\n  try  restart the run: it stages again") from error

    def reason(self, entry: SegmentEntry) -> str:
        """Why the file could not be read during staging. Only for entries that are `unreadable`."""
        return str(self._stored(entry), "utf-8")

    def _stored(self, entry: SegmentEntry) -> memoryview:
        if not DATA_AT <= entry.offset <= entry.offset + entry.stored <= self._records:
            raise StagingError(f"{entry.path} lies outside the staged data")
        return self._view[entry.offset : entry.offset + entry.stored]

    def close(self) -> None:
        self._file.close()
        self._view.release()
        mapping, self._map = self._map, None
        if mapping is not None:
            # BufferError: views of the mapping are still in use. It is unmapped when the last one goes away.
            with suppress(BufferError):
                mapping.close()


def _mapped(file: io.FileIO) -> mmap.mmap:
    try:
        if fcntl.fcntl(file.fileno(), fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise StagingError("this memory is not sealed, so it could change while being read")
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:  # OSError: not a memfd; ValueError: an empty one
        raise StagingError(f"this is not staged data: {error}") from error
