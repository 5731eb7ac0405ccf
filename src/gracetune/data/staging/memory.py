"""Estimate the memory that staging needs, and check it against the limits before and while files are staged."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gracetune.data.backend import Backend, FileStat
from gracetune.data.backends.errors import MemoryLimitError, problem_text
from gracetune.data.backends.paths import suffix_of
from gracetune.data.errors import DataError
from gracetune.data.text_format import counted
from gracetune.hostmem.compression import CHUNK, CompressionCodec, shrinks
from gracetune.units import MIB, format_bytes

FILES_PER_EXTENSION: Final = 4
MOST_EXTENSIONS: Final = 16
"""The number of extensions that are sampled, those with the most bytes first. The others count uncompressed."""


@dataclass(frozen=True)
class StagingEstimate:
    files: int
    raw: int
    """Bytes of the files at their source."""
    stored: int
    """Bytes of memory that they will take, compressed if that is configured."""
    compression: str = "none"
    ratios: Mapping[str, float] = field(default_factory=dict)
    """Compressed size divided by size, by extension, for the sampled ones."""

    def __str__(self) -> str:
        text = f"{counted(self.files, 'file')} of {format_decimal(self.raw)}"
        if self.compression == "none":
            return text
        kinds = ", ".join(f"{kind or 'no extension'} {ratio:.0%}" for kind, ratio in self.ratios.items())
        share = self.stored / max(1, self.raw)
        return f"{text}; {self.compression} leaves {share:.0%} (sampled: {kinds or 'nothing'})"


def format_decimal(count: int) -> str:
    """Format bytes in powers of ten, the units of `memory_limit_gb`."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def estimate_stored(source: Backend, files: Mapping[str, FileStat], codec: CompressionCodec | None) -> StagingEstimate:
    """Estimate the stored size. Without a codec it is exact."""
    raw = sum(facts.size for facts in files.values())
    if codec is None:
        return StagingEstimate(len(files), raw, raw)
    kinds: dict[str, list[str]] = defaultdict(list)
    for path in files:
        kinds[suffix_of(path)].append(path)
    sizes = {kind: sum(files[path].size for path in paths) for kind, paths in kinds.items()}
    largest = sorted(kinds, key=lambda kind: (-sizes[kind], kind))[:MOST_EXTENSIONS]
    ratios = {kind: _ratio(source, kinds[kind], files, codec) for kind in largest if sizes[kind]}
    stored = sum(int(size * ratios.get(kind, 1.0)) for kind, size in sizes.items())
    return StagingEstimate(len(files), raw, stored, codec.name, ratios)


def _ratio(source: Backend, paths: list[str], files: Mapping[str, FileStat], codec: CompressionCodec) -> float:
    """The compression ratio of a few files of different sizes, by their first chunk, as staging decides too."""
    by_size = sorted(paths, key=lambda path: (files[path].size, path))
    step = max(1, len(by_size) // FILES_PER_EXTENSION)
    raw = stored = 0
    for path in by_size[step // 2 :: step][:FILES_PER_EXTENSION]:
        try:
            with source.open(path) as stream:
                chunk = memoryview(stream.read(CHUNK))
        except (DataError, OSError):
            continue  # staging reads the file again and reports the error
        packed = len(codec.pack(chunk))
        raw += len(chunk)
        stored += packed if shrinks(packed, len(chunk)) else len(chunk)
    return stored / raw if raw else 1.0


MEASURE_EVERY: Final = 128 * MIB
"""Free main memory is measured again each time this many bytes have been staged."""


class StagingMemoryGuard:
    """Checks staged bytes against the dataset's limit, the control group and main memory. Thread-safe.

    `headroom` returns the bytes this process can still allocate (None if unknown). `reserve` bytes of it stay free.
    """

    def __init__(
        self,
        dataset: str,
        *,
        limit: int | None,
        headroom: Callable[[], int | None],
        reserve: int,
        measure_every: int = MEASURE_EVERY,
    ) -> None:
        self._dataset = dataset
        self._limit, self._headroom, self._reserve = limit, headroom, reserve
        self._used, self._measured_at, self._measure_every = 0, 0, measure_every
        self._lock = threading.Lock()

    def check(self, estimate: StagingEstimate) -> str | None:
        """Raise MemoryLimitError if the estimate does not fit. Returns a note if something could not be checked."""
        wanted = self._used + estimate.stored
        if self._limit is not None and wanted > self._limit:
            raise MemoryLimitError(self._over_limit(f"about {format_decimal(wanted)} to stage: {estimate}", wanted))
        left = self._headroom()
        if left is None:
            return "main memory: the free amount is unknown, so only memory_limit_gb was checked"
        if estimate.stored > left - self._reserve:
            raise MemoryLimitError(
                self._over_headroom(f"about {format_decimal(estimate.stored)} to stage: {estimate}", left)
            )
        return None

    def take(self, count: int) -> None:
        """Count bytes before they are written. Raises MemoryLimitError if they do not fit."""
        with self._lock:
            self._used += count
            used = self._used
            measure = used - self._measured_at >= self._measure_every
            if measure:
                self._measured_at = used
        if self._limit is not None and used > self._limit:
            raise MemoryLimitError(self._over_limit(f"{format_decimal(used)} staged, with more to come", used))
        left = self._headroom() if measure else None
        if left is not None and left < self._reserve:
            raise MemoryLimitError(self._over_headroom(f"{format_decimal(used)} staged, with more to come", left))

    def give_back(self, count: int) -> None:
        """Subtract bytes of a file that was discarded."""
        with self._lock:
            self._used -= count

    @property
    def used(self) -> int:
        return self._used

    def _over_limit(self, found: str, wanted: int) -> str:
        enough = -(-wanted // 10**9)
        return problem_text(
            f"dataset {self._dataset}: in_memory.memory_limit_gb",
            found=found,
            expected=f"at most {format_decimal(self._limit or 0)}",
            hint=f"memory_limit_gb: {enough} or more, fewer file_extensions, compression: zstd, or type: local",
        )

    def _over_headroom(self, found: str, left: int) -> str:
        usable = max(0, left - self._reserve)
        return problem_text(
            f"dataset {self._dataset}: main memory",
            found=found,
            expected=f"at most {format_decimal(usable)}: {format_bytes(left)} is free in main memory and the control "
            f"group, minus a reserve of {format_bytes(self._reserve)}",
            hint="type: local, compression: zstd, fewer file_extensions, or more memory for the container",
        )
