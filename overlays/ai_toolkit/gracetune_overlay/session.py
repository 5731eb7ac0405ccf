"""One process of a job: open its features, install their hooks, and write a report at the end.

The report is `gracetune_overlay.json` in the run's folder (`gracetune_overlay.rank1.json` for rank 1):

    {"version": 1, "gracetune": "0.1", "outcome": "finished", "features": {"memory": {…}, …}}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from gracetune.extension import Environment, __version__, write_file

from .automagic import AutomagicFeature
from .caches import CacheFeature
from .hooks import Around, Hooks, find_all
from .memory import MemoryFeature, merged_options
from .options import Job
from .pair_files import PairFeature
from .points import POINTS, Feature, Point

REPORT_VERSION: Final = 1
Report = Callable[[str], None]


class Part(Protocol):
    """One feature of a running process."""

    def open(self, process: Any) -> None: ...
    def hooks(self) -> list[tuple[Point, Around]]: ...
    def report(self) -> dict[str, Any]:
        """What the feature did: numbers, and notes about requests that it could not carry out."""

    def close(self) -> None: ...


class Session:
    def __init__(self, job: Job, report: Report) -> None:
        self.job, self._report = job, report

    def check(self) -> None:
        """Raise ConfigError unless ai-toolkit and the environment have everything that the features need."""
        if self.job.block.memory is not None:
            merged_options(self.job.block.memory, Environment.capture())
        wanted = self._features()
        find_all(point for point in POINTS if point.feature in wanted)

    def _features(self) -> set[Feature]:
        block = self.job.block
        wanted: dict[Feature, bool] = {
            "memory": block.memory is not None,
            "latent_cache": block.caches.latents != "disk",
            "text_cache": block.caches.text != "disk",
            "automagic": block.automagic,
            "pair_files": block.pair_files,
        }
        return {feature for feature, requested in wanted.items() if requested}

    def _parts(self) -> dict[str, Part]:
        block, parts = self.job.block, dict[str, Part]()
        memory = None
        if block.memory is not None:
            memory = parts["memory"] = MemoryFeature(block.memory, Environment.capture(), self._report)
        if (block.caches.latents, block.caches.text) != ("disk", "disk"):
            heap = memory.managed if memory is not None else None
            parts["caches"] = CacheFeature(block.caches, self.job.workers, self._report, heap)
        if block.automagic:
            parts["automagic"] = AutomagicFeature(self.job.key_path, self._report)
        if block.pair_files:
            parts["pair_files"] = PairFeature(self._report)
        return parts

    @contextmanager
    def running(self, process: Any) -> Iterator[None]:
        """Open the features in order, and close them in reverse order, also after an error."""
        parts = self._parts()
        outcome = "stopped by an error"
        with ExitStack() as stack:
            stack.callback(lambda: self._write(process, parts, outcome))
            for part in parts.values():
                stack.callback(part.close)
                part.open(process)
            stack.enter_context(Hooks(hook for part in parts.values() for hook in part.hooks()))
            yield
            outcome = "finished"

    def _write(self, process: Any, parts: dict[str, Part], outcome: str) -> None:
        rank = Environment.capture().get("RANK") or "0"
        features = {name: part.report() for name, part in parts.items()}
        body = {
            "version": REPORT_VERSION,
            "gracetune": __version__,
            "outcome": outcome,
            "features": features,
        }
        folder = Path(process.save_root)
        name = "gracetune_overlay.json" if rank == "0" else f"gracetune_overlay.rank{rank}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / name, f"{json.dumps(body, indent=2)}\n".encode())
        except OSError as error:  # a full disk must not hide what stopped the run
            self._report(f"no {name}: {error.strerror or error}; what it would have said: {json.dumps(body)}")
