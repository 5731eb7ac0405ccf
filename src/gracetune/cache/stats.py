"""Statistics of cache reads and of batches, and how they are listed beside torch's memory statistics (`cache.*`)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

PREFIX = "cache."


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """Statistics of one resident store since it was opened."""

    hits: int = 0
    """Reads of entries in memory."""
    hit_bytes: int = 0
    disk_reads: int = 0
    """Reads of entries on disk."""
    disk_bytes: int = 0
    disk_seconds: float = 0.0
    """Time of the disk reads, summed over all threads."""

    @property
    def hit_rate(self) -> float | None:
        """The fraction of reads served from memory; None before the first read."""
        reads = self.hits + self.disk_reads
        return self.hits / reads if reads else None


class StoreCounter:
    """Thread-safe counters behind `StoreStats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hits = self._hit_bytes = self._reads = self._read_bytes = 0
        self._seconds = 0.0

    def count_hit(self, size: int) -> None:
        with self._lock:
            self._hits += 1
            self._hit_bytes += size

    def count_disk_read(self, size: int, seconds: float) -> None:
        with self._lock:
            self._reads += 1
            self._read_bytes += size
            self._seconds += seconds

    def snapshot(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                hits=self._hits,
                hit_bytes=self._hit_bytes,
                disk_reads=self._reads,
                disk_bytes=self._read_bytes,
                disk_seconds=self._seconds,
            )


@dataclass(frozen=True, kw_only=True)
class SourceStats:
    """Statistics of a `BatchSource` since it was opened. All values are totals of this rank."""

    batches: int = 0
    """Micro-batches returned."""
    samples: int = 0
    """Samples in them, including one for each batch that is `BatchRef.padding`."""
    discarded: int = 0
    """Batches prepared ahead but not used, because other ones were requested."""
    live_samples: int = 0
    """Samples encoded during a step because their dataset has no latent cache."""
    live_seconds: float = 0.0
    wait_ms: float = 0.0
    """Time that steps waited for data: measured on the GPU, or on the host without a GPU."""
    step_ms: float = 0.0
    """Compute time between two batches; measured only on a GPU."""
    host_ms: float = 0.0
    """Time that the calling thread spent in `BatchSource.next`."""


def add_cache_stats(
    memory: Mapping[str, Any], source: SourceStats, latents: StoreStats, texts: StoreStats
) -> dict[str, Any]:
    """A copy of torch's memory statistics with the fields of all arguments added as `cache.*`."""
    parts: dict[str, SourceStats | StoreStats] = {"": source, "latents.": latents, "texts.": texts}
    added = {f"{PREFIX}{part}{name}": value for part, stats in parts.items() for name, value in asdict(stats).items()}
    for part, stats in (("latents", latents), ("texts", texts)):
        if stats.hit_rate is not None:
            added[f"{PREFIX}{part}.hit_rate"] = stats.hit_rate
    return {**memory, **added}
