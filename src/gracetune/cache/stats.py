"""What reading the caches cost, counted as it happens and added to torch's memory statistics as `cache.*`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

PREFIX = "cache."


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """Of one resident store, since it was opened."""

    hits: int = 0
    """Entries that were in memory."""
    hit_bytes: int = 0
    disk_reads: int = 0
    """Entries that were not."""
    disk_bytes: int = 0
    disk_seconds: float = 0.0
    """Spent reading them, over all threads."""

    @property
    def hit_rate(self) -> float | None:
        """None before anything was asked for."""
        asked = self.hits + self.disk_reads
        return self.hits / asked if asked else None


class StoreCounter:
    """The same, while it changes; several threads may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hits = self._hit_bytes = self._reads = self._read_bytes = 0
        self._seconds = 0.0

    def hit(self, size: int) -> None:
        with self._lock:
            self._hits += 1
            self._hit_bytes += size

    def read(self, size: int, seconds: float) -> None:
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
    """Of the source of batches."""

    batches: int = 0
    """Handed out."""
    samples: int = 0
    discarded: int = 0
    """Batches gathered ahead and not used, because others were asked for."""
    live_samples: int = 0
    """Encoded in the step because their dataset has no latent cache."""
    live_seconds: float = 0.0
    wait_ms: float = 0.0
    """The step waited this long for its data: on the GPU's clock, or on the host's where there is none."""
    step_ms: float = 0.0
    """And computed for so long between two batches; only known on a GPU."""
    host_ms: float = 0.0
    """What handing out batches and starting the next ones took on the calling thread."""


def merged(memory: Mapping[str, Any], source: SourceStats, latents: StoreStats, texts: StoreStats) -> dict[str, Any]:
    """A copy of a memory statistics dictionary with `cache.*` added."""
    parts: dict[str, SourceStats | StoreStats] = {"": source, "latents.": latents, "texts.": texts}
    added = {f"{PREFIX}{part}{name}": value for part, stats in parts.items() for name, value in asdict(stats).items()}
    for part, stats in (("latents", latents), ("texts", texts)):
        if stats.hit_rate is not None:
            added[f"{PREFIX}{part}.hit_rate"] = stats.hit_rate
    return {**memory, **added}
