"""Estimating the memory of staged files in advance, from their sizes and from compressing a few files of each kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gracetune.data.backend import Backend, FileStat
from gracetune.data.backends.paths import suffix_of
from gracetune.data.errors import DataError
from gracetune.data.text_format import counted
from gracetune.hostmem.compression import CHUNK, CompressionCodec, shrinks

SAMPLES_PER_KIND: Final = 4
KINDS: Final = 16
"""The number of extensions that are sampled, those with the most bytes first. The others count uncompressed."""


@dataclass(frozen=True)
class Estimate:
    files: int
    raw: int
    stored: int
    compression: str = "none"
    ratios: Mapping[str, float] = field(default_factory=dict)
    """Compressed size divided by size, by extension, for the sampled ones."""

    def __str__(self) -> str:
        text = f"{counted(self.files, 'file')} of {decimal(self.raw)}"
        if self.compression == "none":
            return text
        kinds = ", ".join(f"{kind or 'no extension'} {ratio:.0%}" for kind, ratio in self.ratios.items())
        share = self.stored / max(1, self.raw)
        return f"{text}; {self.compression} leaves {share:.0%} (sampled: {kinds or 'nothing'})"


def decimal(count: int) -> str:
    """Format bytes in powers of ten, the units of `memory_limit_gb`."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def estimate_stored(source: Backend, files: Mapping[str, FileStat], codec: CompressionCodec | None) -> Estimate:
    """Estimate the stored size. Without a codec it is exact."""
    raw = sum(facts.size for facts in files.values())
    if codec is None:
        return Estimate(len(files), raw, raw)
    kinds: dict[str, list[str]] = defaultdict(list)
    for path in files:
        kinds[suffix_of(path)].append(path)
    sizes = {kind: sum(files[path].size for path in paths) for kind, paths in kinds.items()}
    largest = sorted(kinds, key=lambda kind: (-sizes[kind], kind))[:KINDS]
    ratios = {kind: _ratio(source, kinds[kind], files, codec) for kind in largest if sizes[kind]}
    stored = sum(int(size * ratios.get(kind, 1.0)) for kind, size in sizes.items())
    return Estimate(len(files), raw, stored, codec.name, ratios)


def _ratio(source: Backend, paths: list[str], files: Mapping[str, FileStat], codec: CompressionCodec) -> float:
    """The compression ratio of a few files of different sizes, by their first chunk, as staging decides too."""
    by_size = sorted(paths, key=lambda path: (files[path].size, path))
    step = max(1, len(by_size) // SAMPLES_PER_KIND)
    raw = stored = 0
    for path in by_size[step // 2 :: step][:SAMPLES_PER_KIND]:
        try:
            with source.open(path) as stream:
                chunk = memoryview(stream.read(CHUNK))
        except (DataError, OSError):
            continue  # staging reads the file again and reports the error
        packed = len(codec.pack(chunk))
        raw += len(chunk)
        stored += packed if shrinks(packed, len(chunk)) else len(chunk)
    return stored / raw if raw else 1.0
