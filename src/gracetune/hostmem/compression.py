"""The codecs a staged file can be stored with.

A compressed file is a row of chunks, each holding CHUNK bytes of the file (the last one what is left): a 32-bit
little-endian length, and that many bytes. The length's highest bit marks a chunk that did not shrink and is stored as
it is. Chunks bound the memory a staging thread needs, and files of any size fit codecs that stop at 2 GiB.
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
LEAST_SAVING: Final = 1 / 32
"""A file that saves less is stored as it is: reading it without a copy is worth more than 3 % of its memory."""

_LENGTH: Final = struct.Struct("<I")
CHUNK_OVERHEAD: Final = _LENGTH.size
_AS_IT_IS: Final = 1 << 31


@dataclass(frozen=True)
class Codec:
    name: Compression
    number: int
    """As stored in the index; never reused for another codec."""
    compress: Callable[[memoryview], Any]
    decompress_into: Callable[[memoryview, memoryview], int]

    def pack(self, chunk: memoryview) -> bytes:
        """One chunk as it is stored, its length in front."""
        packed = memoryview(self.compress(chunk))
        if len(packed) >= len(chunk):
            return _LENGTH.pack(len(chunk) | _AS_IT_IS) + bytes(chunk)
        return _LENGTH.pack(len(packed)) + bytes(packed)

    def unpack(self, stored: memoryview, raw_size: int) -> memoryview:
        """The whole file again."""
        raw = memoryview(bytearray(raw_size))
        done = 0
        for piece, as_it_is in _chunks(stored):
            target = raw[done : done + CHUNK]
            if as_it_is:
                target[:] = piece
            elif self.decompress_into(piece, target) != len(target):
                raise ValueError(f"a {self.name} chunk is shorter than it was")
            done += len(target)
        if done != raw_size:
            raise ValueError(f"{done} bytes came out of {self.name} instead of {raw_size}")
        return raw.toreadonly()


def shrinks(stored: int, raw: int) -> bool:
    """Whether keeping the compressed form is worth it."""
    return stored <= raw * (1 - LEAST_SAVING)


def _chunks(stored: memoryview) -> Iterator[tuple[memoryview, bool]]:
    at = 0
    while at < len(stored):
        length = int.from_bytes(stored[at : at + _LENGTH.size], "little")
        size = length & ~_AS_IT_IS
        at += _LENGTH.size
        if at + size > len(stored):
            raise ValueError("a compressed chunk reaches beyond its file")
        yield stored[at : at + size], bool(length & _AS_IT_IS)
        at += size


# Levels are the quick ones: staging should run at the speed of the disk, and media hardly shrink at any level.
CODECS: Final[Mapping[Compression, Codec]] = {
    "lz4": Codec(
        "lz4",
        1,
        lambda data: cramjam.lz4.compress_block(data, store_size=False),
        lambda data, out: cramjam.lz4.decompress_block_into(data, out, output_len=len(out)),
    ),
    "zlib": Codec("zlib", 2, lambda data: cramjam.zlib.compress(data, 1), cramjam.zlib.decompress_into),
    "snappy": Codec("snappy", 3, cramjam.snappy.compress_raw, cramjam.snappy.decompress_raw_into),
    "zstd": Codec("zstd", 4, lambda data: cramjam.zstd.compress(data, 3), cramjam.zstd.decompress_into),
}
BY_NUMBER: Final[Mapping[int, Codec]] = {codec.number: codec for codec in CODECS.values()}


def codec_for(compression: Compression) -> Codec | None:
    return None if compression == "none" else CODECS[compression]
