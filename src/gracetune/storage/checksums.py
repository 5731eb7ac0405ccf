"""Files with checksums: written through to the disk, and checked when they are read."""

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
    """What a file has to be."""

    size: int
    checksum: str
    """xxh3-128 of all its bytes, in hexadecimal."""


def write_checksummed(path: Path, parts: Iterable[memoryview]) -> Fact:
    """A file that was not there before; on the disk when this returns. An OSError names the file."""
    digest, size = xxhash.xxh3_128(), 0

    def counted() -> Iterator[memoryview]:
        nonlocal size
        for part in parts:
            for begin in range(0, len(part), _CHUNK):
                chunk = part[begin : begin + _CHUNK]
                digest.update(chunk)
                size += len(chunk)
                yield chunk

    write_new(path, counted())
    return Fact(size, digest.hexdigest())


def difference(path: Path, expected: Fact) -> str | None:
    """How the file differs from what it has to be; None where it does not. OSError where it cannot be read."""
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
