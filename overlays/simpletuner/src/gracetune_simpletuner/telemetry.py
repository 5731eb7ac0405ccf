"""A log of the overlay's actions, as JSON lines in the run's output folder. It is written only if a feature is used.

<output_dir>/gracetune-overlay.jsonl            rank 0
<output_dir>/gracetune-overlay-rank-<n>.jsonl   other ranks

Each line is one object with `format` (1), `event`, `time_s` (Unix) and the fields of the event. Sizes end in
`_bytes`, durations in `_s`.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORMAT = 1

logger = logging.getLogger("gracetune.overlay")


class Counts:
    """Thread-safe counters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reasons: dict[str, Counter[str]] = {}

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def reject(self, name: str, reason: str) -> None:
        """Count a request that was not carried out, by reason."""
        with self._lock:
            self._reasons.setdefault(name, Counter())[reason] += 1

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            reasons = {name: dict(counted) for name, counted in self._reasons.items()}
            return dict(self._counts) | ({"refused": reasons} if reasons else {})


class Telemetry:
    """Buffers lines until `open` names the output folder."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.counts: dict[str, Counts] = {}
        self._clock = clock
        self._path: Path | None = None
        self._waiting: list[str] = []
        self._lock = threading.Lock()
        self._warned = False

    def of(self, feature: str) -> Counts:
        return self.counts.setdefault(feature, Counts())

    def open(self, output_dir: Path, rank: int) -> None:
        name = "gracetune-overlay.jsonl" if rank == 0 else f"gracetune-overlay-rank-{rank}.jsonl"
        with self._lock:
            self._path = output_dir / name
            waiting, self._waiting = self._waiting, []
        for line in waiting:
            self._append(line)

    def emit(self, event: str, **content: Any) -> None:
        line = json.dumps({"format": FORMAT, "event": event, "time_s": round(self._clock(), 3)} | content)
        with self._lock:
            if self._path is None:
                self._waiting.append(line)
                return
        self._append(line)

    def finish(self) -> None:
        """Write the counts of every feature."""
        if self._path is not None:
            self.emit("finished", counts={name: counts.snapshot() for name, counts in sorted(self.counts.items())})

    def _append(self, line: str) -> None:
        """Append a line. A full disk loses lines and never stops the run."""
        assert self._path is not None
        with self._lock:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                _append_whole(self._path, f"{line}\n".encode())
            except OSError as error:
                if not self._warned:
                    logger.warning("gracetune: telemetry is missing lines: %s", error)
                self._warned = True


def _append_whole(path: Path, line: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        if file.write(line) != len(line):
            file.truncate(before)  # half a line would corrupt the next one too
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
