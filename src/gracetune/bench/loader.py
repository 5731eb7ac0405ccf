"""Speed of decoded batches: from memory, from a folder with a warm page cache, and from memory without that folder."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, Literal

import numpy as np
from PIL import Image

from gracetune.bench.row import BenchRow
from gracetune.config.run_config import RunConfig
from gracetune.data.backends.pool import BackendPool
from gracetune.data.geometry import Geometry
from gracetune.data.index import DataIndex
from gracetune.data.index_builder import build_index
from gracetune.data.loader import Exhausted, Loader
from gracetune.data.refs import BatchRef
from gracetune.hardware.machine import Machine

IMAGES: Final = 32
SIDE: Final = 512
BATCH: Final = 4
ROUNDS: Final = 40


@dataclass(frozen=True)
class Epoch:
    """The duration of one epoch."""

    seconds: float
    cpu_seconds: float


def loader_rows(folder: Path, machine: Machine) -> Iterator[BenchRow]:
    """Compare staged with local data, and staged data with and without its source folder.

    The ratios are of CPU time. Decoding from memory or a warm page cache never waits, so CPU time determines batches
    per second, and unlike wall time it does not include other programs.
    """
    make_images(folder)
    with BackendPool(machine=machine) as pool:
        local, staged = (_index(folder, kind, pool) for kind in ("local", "in_memory"))
        rounds = [(run_epoch(local), run_epoch(staged), _without(folder, staged)) for _ in range(ROUNDS)]
    warm, memory, alone = zip(*rounds, strict=True)
    detail = f"{_rate(memory)} batches/s from memory, {_rate(warm)} from the warm folder; {BATCH} x {SIDE}x{SIDE}"
    ratio = _ratio(warm, memory)
    yield BenchRow("batches_over_local", ratio, "ratio", ">= 1", ratio >= 1, detail)
    detail = f"{_rate(alone)} batches/s after the folder was removed, {_rate(memory)} with it there"
    ratio = _ratio(memory, alone)
    yield BenchRow("batches_without_source", ratio, "ratio", ">= 0.95", ratio >= 0.95, detail)


def _ratio(slower: Sequence[Epoch], faster: Sequence[Epoch]) -> float:
    """The median over rounds; the two epochs of a round ran one after the other."""
    return median(one.cpu_seconds / two.cpu_seconds for one, two in zip(slower, faster, strict=True))


def _rate(epochs: Sequence[Epoch]) -> str:
    """Best batches per second by wall time."""
    return f"{IMAGES / BATCH / min(epoch.seconds for epoch in epochs):.1f}"


def _without(folder: Path, staged: DataIndex) -> Epoch:
    away = folder.rename(folder.with_name(f"{folder.name}-away"))
    try:
        return run_epoch(staged)
    finally:
        away.rename(folder)


def make_images(folder: Path) -> None:
    """Write uncompressed images, so that the storage is measured and not a decoder."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(IMAGES):
        noise = generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number:04}.bmp")
        (folder / f"{number:04}.txt").write_text("a generated image")


def run_epoch(index: DataIndex) -> Epoch:
    """Every sample once, decoded by two threads."""
    started, cpu = time.perf_counter(), time.process_time()
    loader, samples = Loader(index, batch_size=BATCH, epochs=1), 0
    with ThreadPoolExecutor(2) as threads:
        while not isinstance(outcome := loader.next_batch(), Exhausted):
            if isinstance(outcome, BatchRef):
                samples += len([*threads.map(index.load, outcome.samples)])
    if samples != IMAGES:
        raise ValueError(f"{samples} samples in an epoch of {IMAGES}")
    return Epoch(time.perf_counter() - started, time.process_time() - cpu)


def _index(folder: Path, kind: Literal["local", "in_memory"], pool: BackendPool) -> DataIndex:
    config = RunConfig.model_validate(
        {
            "name": "bench",
            "output_dir": str(folder.parent / "out"),
            "model": {"family": "sdxl"},
            "training": {"max_steps": 1},
            "datasets": [{"id": kind, "path": str(folder), "type": kind, "resolution": float(SIDE)}],
        }
    )
    return build_index(config, Geometry("image", side_multiple=32), open_backend=pool.open)
