"""What goes wrong with caches. Each message says what was found, what was expected and what to type."""

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
    """A folder that is not a cache of ours, or of a release newer than this one. Nothing in it was touched."""


class ReadOnlyCacheError(CacheError):
    """The cache can be read, and not written to."""


class CacheFullError(CacheError):
    """No room on the disk. Everything flushed earlier is complete; nothing half was left behind."""


class CacheBusyError(CacheError):
    """Another process uses the cache in a way that forbids what was asked."""


class EntriesError(CacheError):
    """Some entries cannot be had; `keys` names them all."""

    def __init__(self, keys: Iterable[str], folder: Path, problem: Problem) -> None:
        super().__init__(problem)
        self.keys = tuple(keys)
        self.folder = folder


class MissingEntryError(EntriesError):
    """The cache has no such entries."""

    def __init__(self, keys: Iterable[str], folder: Path, sample: str | None = None) -> None:
        keys = tuple(keys)
        super().__init__(
            keys,
            folder,
            Problem(
                key=f"{len(keys):,} cache entries are missing",
                found=_of(sample, listed(keys)),
                expected="every entry the run wants",
                hint="gracetune cache build CONFIG; it encodes only what is missing",
                file=str(folder),
            ),
        )


class CorruptEntryError(EntriesError):
    """The bytes of these entries are not those that were written. From here on the store counts them as missing."""

    def __init__(self, keys: Iterable[str], folder: Path, sample: str | None = None) -> None:
        keys = tuple(keys)
        super().__init__(
            keys,
            folder,
            Problem(
                key=f"{len(keys):,} cache entries are damaged",
                found=f"bytes that do not match their checksum: {_of(sample, listed(keys))}",
                expected="the bytes that were written",
                hint="gracetune cache build CONFIG encodes them again; look at the disk (`dmesg`, `smartctl -a`) too",
                file=str(folder),
            ),
        )


def _of(sample: str | None, keys: str) -> str:
    """A key means nothing to people: the sample goes first, where it is known."""
    return keys if sample is None else f"{sample} (entry {keys})"


def listed(names: Iterable[str]) -> str:
    names = tuple(names)
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def unwritable(error: OSError, folder: Path, *, needed: int, free: int | None) -> CacheError:
    """The error of ours for one that writing gave."""
    kind = explain(error, folder).kind
    then = "then start again: it goes on" if kind == "full" else AGAIN
    problem = problem_of(error, "cache", folder, elsewhere="set cache.cache_dir to another folder", then=then)
    if kind == "full":
        found = problem.found if free is None else f"{problem.found}; {format_bytes(free)} free"
        expected = f"room for {format_bytes(needed)}" if needed else "room for a few small files"
        return CacheFullError(replace(problem, found=found, expected=expected))
    return ReadOnlyCacheError(problem) if kind == "forbidden" else CacheError(problem)


def unreadable(error: OSError, path: Path) -> CacheError:
    return CacheError(problem_of(error, "cache", path, access="read"))
