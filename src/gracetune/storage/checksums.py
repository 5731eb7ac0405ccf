"""Files with checksums: flushed to disk when written, compared with their size and checksum when read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from gracetune.storage.atomic import write_new
from gracetune.storage.regular_files import open_regular
from gracetune.units import MIB

_CHUNK = 16 * MIB


@dataclass(frozen=True)
class Fact:
    """The recorded size and checksum of a file."""

    size: int
    checksum: str
    """xxh3-128 of the whole content, in hexadecimal."""


def write_checksummed(path: Path, parts: Iterable[memoryview]) -> Fact:
    """Create a file, flush it and return its size and checksum. Every OSError raised carries the path."""
    digest, size = xxhash.xxh3_128(), 0

    def hashed_chunks() -> Iterator[memoryview]:
        nonlocal size
        for part in parts:
            for begin in range(0, len(part), _CHUNK):
                chunk = part[begin : begin + _CHUNK]
                digest.update(chunk)
                size += len(chunk)
                yield chunk

    write_new(path, hashed_chunks())
    return Fact(size, digest.hexdigest())


def difference(path: Path, expected: Fact) -> str | None:
    """Describe how the file differs from `expected`, or return None. Raises OSError if the file cannot be read."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "it is missing"
    if size != expected.size:
        return f"{size:,} bytes instead of {expected.size:,}"
    digest = xxhash.xxh3_128()
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return None if digest.hexdigest() == expected.checksum else "its bytes do not match their checksum"
