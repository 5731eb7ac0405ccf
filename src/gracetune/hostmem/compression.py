"""Compression codecs for staged files.

A compressed file is a sequence of chunks. Each holds CHUNK bytes of the file, the last one the remainder. A chunk is
stored as a 32-bit little-endian length followed by that many bytes. The highest bit of the length marks a chunk that
did not shrink and is stored uncompressed. Chunks bound the memory a staging thread needs, and they let codecs with a
2 GiB limit handle files of any size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import cramjam

from gracetune.units import MIB

Compression: TypeAlias = Literal["none", "lz4", "zlib", "snappy", "zstd"]

CHUNK: Final = 1 * MIB
RAW: Final = 0
"""Codec number of an uncompressed file."""
LEAST_SAVING: Final = 1 / 32
"""Files that save less are stored uncompressed: reading them without a copy is worth more than 3 % of their memory."""

_LENGTH: Final = struct.Struct("<I")
CHUNK_OVERHEAD: Final = _LENGTH.size
_UNCOMPRESSED: Final = 1 << 31
"""The flag bit in a chunk's length."""


@dataclass(frozen=True)
class CompressionCodec:
    name: Compression
    number: int
    """The number stored in the index. Never reuse it for another codec."""
    compress: Callable[[memoryview], Any]
    decompress_into: Callable[[memoryview, memoryview], int]
    """Decompresses the first buffer into the second and returns the number of bytes written."""

    def pack(self, chunk: memoryview) -> bytes:
        """One chunk in stored form: its length, then its bytes."""
        packed = memoryview(self.compress(chunk))
        if len(packed) >= len(chunk):
            return _LENGTH.pack(len(chunk) | _UNCOMPRESSED) + bytes(chunk)
        return _LENGTH.pack(len(packed)) + bytes(packed)

    def unpack(self, stored: memoryview, raw_size: int) -> memoryview:
        """Decompress a whole file of `raw_size` bytes."""
        raw = memoryview(bytearray(raw_size))
        done = 0
        for chunk, is_uncompressed in _chunks(stored):
            target = raw[done : done + CHUNK]
            if is_uncompressed:
                target[:] = chunk
            elif self.decompress_into(chunk, target) != len(target):
                raise ValueError(f"a {self.name} chunk decompressed to fewer bytes than expected")
            done += len(target)
        if done != raw_size:
            raise ValueError(f"{self.name} data decompressed to {done} bytes, expected {raw_size}")
        return raw.toreadonly()


def shrinks(stored: int, raw: int) -> bool:
    """Whether keeping the compressed form is worth it."""
    return stored <= raw * (1 - LEAST_SAVING)


def _chunks(stored: memoryview) -> Iterator[tuple[memoryview, bool]]:
    """Each chunk's stored bytes, and whether they are uncompressed."""
    offset = 0
    while offset < len(stored):
        length = int.from_bytes(stored[offset : offset + _LENGTH.size], "little")
        size = length & ~_UNCOMPRESSED
        offset += _LENGTH.size
        if offset + size > len(stored):
            raise ValueError("a compressed chunk extends beyond the end of its file")
        yield stored[offset : offset + size], bool(length & _UNCOMPRESSED)
        offset += size


# The fastest useful levels: staging should run at disk speed, and media files hardly shrink at any level.
CODECS: Final[Mapping[Compression, CompressionCodec]] = {
    "lz4": CompressionCodec(
        "lz4",
        1,
        lambda data: cramjam.lz4.compress_block(data, store_size=False),
        lambda data, out: cramjam.lz4.decompress_block_into(data, out, output_len=len(out)),
    ),
    "zlib": CompressionCodec("zlib", 2, lambda data: cramjam.zlib.compress(data, 1), cramjam.zlib.decompress_into),
    "snappy": CompressionCodec("snappy", 3, cramjam.snappy.compress_raw, cramjam.snappy.decompress_raw_into),
    "zstd": CompressionCodec("zstd", 4, lambda data: cramjam.zstd.compress(data, 3), cramjam.zstd.decompress_into),
}
BY_NUMBER: Final[Mapping[int, CompressionCodec]] = {codec.number: codec for codec in CODECS.values()}


def codec_for(compression: Compression) -> CompressionCodec | None:
    """The codec of a config value; None for `none`."""
    return None if compression == "none" else CODECS[compression]
