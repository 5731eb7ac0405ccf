"""Segments: memory that holds many files, is written once, sealed, and then shared between processes.

Format version 2. A segment is a memfd, a file that exists only in memory until its last user closes it. All numbers are
little-endian. The parts, by offset:

      0  header: magic "GTARENA\\0", u32 version, u32 number of records, u64 offset of the records, u64 offset of the
         names, u64 size of the segment, 16 bytes random identity, 16 bytes checksum; zeros up to 128
    128  file contents: each starts at a multiple of 64; the bytes in between are undefined
    ...  records of 64 bytes, sorted by name: u64 offset of the name from the start of the names, u32 its length,
         u16 codec, u16 zero, u64 offset, u64 stored size, u64 size, i64 modification time in ns,
         16 bytes xxh3-128 of the file's content
    ...  names: UTF-8 without separators, up to the end

Codec 0 means uncompressed; compression.py lists the others. 65534 marks a file that could not be read; its stored
content is the reason in UTF-8. The checksum is xxh3-128 over the header before it, the records and the names.

Readers find records by bisection in the shared memory, so a worker process needs no memory of its own for the index.
The index is verified once, when the segment is opened. Readers reject a segment that lacks any seal: without them
another process could truncate or change it while it is read. A dataset has several segments.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import mmap
import os
import secrets
import struct
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import cramjam
import xxhash
from pydantic import BaseModel, ConfigDict

from gracetune.hostmem.compression import BY_NUMBER, RAW
from gracetune.hostmem.errors import StagingError
from gracetune.hostmem.numa import NodeChoice, bind
from gracetune.units import MIB, format_bytes

MAGIC: Final = b"GTARENA\0"
VERSION: Final = 2
HEADER: Final = struct.Struct("<8sIIQQQ16s")
CHECKSUM_AT: Final = HEADER.size
DATA_AT: Final = 128
ALIGNMENT: Final = 64
"""Of file contents: one cache line."""
RECORD: Final = struct.Struct("<QIHHQQQq16s")
UNREADABLE: Final = 65534
"""Codec number of a file that could not be read."""
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

_PUNCH_HOLE_KEEP_SIZE: Final = 0x02 | 0x01
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""


@dataclass(frozen=True)
class SegmentEntry:
    """One staged file."""

    path: str
    codec: int
    offset: int
    stored: int
    """Bytes in the segment."""
    size: int
    """Bytes of the file."""
    modified_ns: int
    digest: bytes
    """xxh3-128 of the file's content."""

    @property
    def unreadable(self) -> bool:
        return self.codec == UNREADABLE


def checksum(header: bytes | memoryview, index: bytes | memoryview) -> bytes:
    """xxh3-128 of the header and the index, which is the records followed by the names."""
    digest = xxhash.xxh3_128(header)
    digest.update(index)
    return digest.digest()


class SegmentWriter:
    """A segment while it is being filled. Several threads may reserve space and write at the same time.

    Files are written with `pwrite`, not through a mapping. This avoids a page fault and the zeroing of every page, and
    a memfd can only be sealed if no process has mapped it for writing. `capacity` only sets the file's length; memory
    is used as pages are written.
    """

    def __init__(self, capacity: int, choice: NodeChoice) -> None:
        if not hasattr(os, "memfd_create"):
            raise StagingError("type in_memory needs Linux (memfd)\n  try  type: local")
        self._capacity = DATA_AT + capacity
        self._next = DATA_AT
        self._lock = threading.Lock()
        try:
            # Close-on-exec: a child process must not keep the dataset in memory.
            descriptor = os.memfd_create("gracetune-staged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._file = io.FileIO(descriptor, "r+")
            self._file.truncate(self._capacity)
        except OSError as error:
            raise StagingError(f"cannot create a memory file of {format_bytes(capacity)}: {error}") from error
        try:
            self.numa = bind(self._file.fileno(), self._capacity, choice)
        except BaseException:
            self._file.close()
            raise

    def reserve(self, size: int) -> int:
        """Reserve space for `size` bytes and return its offset."""
        with self._lock:
            offset = self._next
            after = -(-(offset + size) // ALIGNMENT) * ALIGNMENT  # rounded up
            if after > self._capacity:
                raise StagingError(
                    "the files grew while they were being staged\n"
                    "  try  again when nothing writes to the dataset's folder"
                )
            self._next = after
            return offset

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write data at a reserved offset."""
        rest = memoryview(data)
        while rest:
            try:
                done = os.pwrite(self._file.fileno(), rest, offset)
            except OSError as error:
                raise StagingError(
                    f"no more memory for staged files: {error.strerror}\n"
                    "  try  a lower in_memory.memory_limit_gb, or type: local"
                ) from error
            rest, offset = rest[done:], offset + done

    def discard(self, offset: int, size: int) -> None:
        """Release the whole pages of a reserved range, whose file could not be read to the end."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (offset + size) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length <= 0:
            return
        library = ctypes.CDLL(None, use_errno=True)
        library.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        if library.fallocate(self._file.fileno(), _PUNCH_HOLE_KEEP_SIZE, start, length) != 0:
            code = ctypes.get_errno()
            raise StagingError(f"memory of an unread file cannot be released: {errno.errorcode.get(code, code)}")

    def finish(self, entries: Iterable[SegmentEntry]) -> io.FileIO:
        """Write the index, seal the segment and return its read-only file. The writer cannot be used afterwards."""
        ordered = sorted(((entry.path.encode(), entry) for entry in entries), key=lambda pair: pair[0])
        records, names = bytearray(), bytearray()
        for name, entry in ordered:
            records += RECORD.pack(
                len(names), len(name), entry.codec, 0, entry.offset, entry.stored, entry.size, entry.modified_ns,
                entry.digest,
            )  # fmt: skip
            names += name
        at = self.reserve(0)
        index = bytes(records + names)
        end = at + len(index)
        header = HEADER.pack(MAGIC, VERSION, len(ordered), at, at + len(records), end, secrets.token_bytes(16))
        self.write(0, header + checksum(header, index))
        self.write(at, index)
        return self._sealed(end)

    def _sealed(self, size: int) -> io.FileIO:
        try:
            self._file.truncate(size)
            fcntl.fcntl(self._file.fileno(), fcntl.F_ADD_SEALS, SEALS)
            # Open it again read-only: older kernels do not map a write-sealed file through a writable descriptor.
            reader = io.FileIO(os.open(f"/proc/self/fd/{self._file.fileno()}", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise StagingError(f"staged memory cannot be sealed: {error}") from error
        self.close()
        return reader

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def capacity_for(sizes: Iterable[int]) -> int:
    """The capacity for files of these sizes, with room for files that grow, are read twice, or have long names."""
    known = list(sizes)
    page = mmap.PAGESIZE
    # Per file: two partial pages, alignment, its record and a path of up to 4096 bytes (PATH_MAX).
    return 2 * sum(known) + len(known) * (2 * page + ALIGNMENT + RECORD.size + 4096) + 64 * MIB


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
