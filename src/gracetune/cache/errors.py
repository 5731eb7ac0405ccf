"""Errors of caches. Each message says what was found, what was expected and what to type."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from gracetune.errors import GracetuneError, Problem
from gracetune.storage.os_errors import AGAIN, explain, problem_of
from gracetune.units import format_bytes

_SHOWN = 8


class CacheError(GracetuneError):
    """A cache cannot be used as it is."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class ForeignFolderError(CacheError):
    """The folder is not a gracetune cache, or a newer release wrote it. Nothing in it was changed."""


class ReadOnlyCacheError(CacheError):
    """The cache can be read but not written."""


class CacheFullError(CacheError):
    """The disk is full. Entries flushed earlier are complete, and no partial file was left behind."""


class CacheBusyError(CacheError):
    """Another process uses the cache, so the operation is not possible now."""


class EntriesError(CacheError):
    """Some entries are not available. `keys` lists all of them."""

    def __init__(self, keys: Iterable[str], folder: Path, problem: Problem) -> None:
        super().__init__(problem)
        self.keys = tuple(keys)
        self.folder = folder


class MissingEntryError(EntriesError):
    """The cache does not contain these entries."""

    def __init__(self, keys: Iterable[str], folder: Path, sample: str | None = None) -> None:
        keys = tuple(keys)
        super().__init__(
            keys,
            folder,
            Problem(
                key="1 cache entry is missing" if len(keys) == 1 else f"{len(keys):,} cache entries are missing",
                found=_of(sample, listed(keys)),
                expected="all entries that the run uses",
                hint="run `gracetune cache build CONFIG`; it encodes only missing entries",
                file=str(folder),
            ),
        )


class CorruptEntryError(EntriesError):
    """The stored bytes of these entries do not match their checksums. The store now treats them as missing."""

    def __init__(self, keys: Iterable[str], folder: Path, sample: str | None = None) -> None:
        keys = tuple(keys)
        super().__init__(
            keys,
            folder,
            Problem(
                key="1 cache entry is damaged" if len(keys) == 1 else f"{len(keys):,} cache entries are damaged",
                found=f"bytes that do not match their checksum: {_of(sample, listed(keys))}",
                expected="the bytes that were written",
                hint="run `gracetune cache build CONFIG` to encode them again; check the disk (`dmesg`, `smartctl -a`)",
                file=str(folder),
            ),
        )


def _of(sample: str | None, keys: str) -> str:
    """Name the sample first if it is known, because users do not recognize keys."""
    return keys if sample is None else f"{sample} (entry {keys})"


def listed(names: Iterable[str]) -> str:
    names = tuple(names)
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def unwritable(error: OSError, folder: Path, *, needed: int, free: int | None) -> CacheError:
    """The cache error for an OSError of a write. `needed` and `free`: bytes, for the message."""
    kind = explain(error, folder).kind
    then = "then start again; completed work is kept" if kind == "full" else AGAIN
    problem = problem_of(error, "cache", folder, elsewhere="set cache.cache_dir to another folder", then=then)
    if kind == "full":
        found = problem.found if free is None else f"{problem.found}; {format_bytes(free)} free"
        expected = f"room for {format_bytes(needed)}" if needed else "room for a few small files"
        return CacheFullError(replace(problem, found=found, expected=expected))
    return ReadOnlyCacheError(problem) if kind == "forbidden" else CacheError(problem)


def unreadable(error: OSError, path: Path) -> CacheError:
    """The cache error for an OSError of a read."""
    return CacheError(problem_of(error, "cache", path, access="read"))
