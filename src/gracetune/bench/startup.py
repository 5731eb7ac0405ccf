"""Start of a run with many images: the first scan of a folder, and a start with scan and caches on disk, without a
model.

Each is measured in a new process by wall time, with the CPU cores it is given and no memory allocated before. CPU time
is stated too: where it is far less than the wall time, other programs were running or the storage was slow.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image

from gracetune.bench.cache import KEYS
from gracetune.bench.row import BenchRow
from gracetune.cache.encoder import EncoderId, LatentEncoder, TextEncoder
from gracetune.cache.folders import cache_folders
from gracetune.cache.residence import CacheResources
from gracetune.cache.session import Caches, build, needs
from gracetune.config.run_config import RunConfig, Validation
from gracetune.data.geometry import Geometry
from gracetune.data.index_builder import build_index, scan_folder
from gracetune.data.loader import Loader
from gracetune.errors import MachineError
from gracetune.hardware.machine import Machine
from gracetune.train.data import load_caches

IMAGES: Final = 30_000
ROUNDS: Final = 5
MOST_SECONDS: Final = 5.0
"""The bar for a warm start of `IMAGES`. Loading a small model and the first batch takes about as long again."""
_SIZES: Final = ((64, 64), (96, 64), (64, 96), (80, 64))
_GEOMETRY: Final = Geometry("image", side_multiple=32)


def starting_rows(folder: Path, machine: Machine, *, images: int = IMAGES, rounds: int = ROUNDS) -> Iterator[BenchRow]:
    make_images(folder / "images", images)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield BenchRow("scan_two_cores", 1.0, "ratio", detail="this process has one core")
    else:
        # Alternate, and take the best of each, so that other programs slow both down alike.
        times = [(_seconds("scan", folder, machine, cores[:1]), _seconds("scan", folder, machine, cores[:2]))
                 for _ in range(rounds)]  # fmt: skip
        one, two = min(alone for alone, _ in times), min(both for _, both in times)
        detail = f"{images:,} small files with captions: {one} on one core, {two} on two; warm files"
        yield BenchRow("scan_two_cores", one.wall / two.wall, "ratio", "> 1", one.wall > two.wall, detail)
    fill_caches(folder)
    spent = [_seconds("warm", folder, machine, cores) for _ in range(rounds)]
    least, most = min(spent), max(spent)
    detail = f"{images:,} samples: index, wanted entries, order, first batch; {least} to {most}"
    yield BenchRow("warm_start_seconds", least.wall, "s", f"< {MOST_SECONDS:g}", least.wall < MOST_SECONDS, detail)


@dataclass(frozen=True, order=True)
class Spent:
    """What a process needed, in seconds. The CPU time includes that of the processes it started."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:.2f} s ({self.cpu:.2f} s of CPU)"


def make_images(folder: Path, count: int) -> None:
    generator = np.random.default_rng(0)
    for number in range(count):
        inside = folder / f"{number // 1000:03}"
        inside.mkdir(parents=True, exist_ok=True)
        width, height = _SIZES[number % len(_SIZES)]
        blocks = generator.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        kind = "png" if number % 5 == 4 else "jpg"
        Image.fromarray(blocks.repeat(8, 0).repeat(8, 1)).save(inside / f"{number:06}.{kind}")
        (inside / f"{number:06}.txt").write_text(f"generated image {number}, tag {number % 17}")


@dataclass(frozen=True)
class _KnownEncoders:
    """Encoder ids without encoders. No entry is missing, so none is ever loaded."""

    def text_id(self) -> EncoderId:
        return KEYS.text

    def latent_id(self) -> EncoderId:
        return KEYS.latent

    def reads_images(self) -> bool:
        return False

    def prompts(self, validation: Validation) -> list[str]:
        return []

    def load_text(self) -> TextEncoder:
        raise ValueError("an entry is missing")

    def load_latents(self) -> LatentEncoder:
        raise ValueError("an entry is missing")

    def tile(self, why: str) -> None: ...

    def tiling_note(self) -> str | None:
        return None

    def forget_tiling(self) -> None: ...


def _config(folder: Path) -> RunConfig:
    dataset = {"id": "many", "path": str(folder / "images"), "type": "local", "resolution": 64.0}
    return RunConfig.model_validate(
        {
            "name": "bench",
            "output_dir": str(folder / "out"),
            "model": {"family": "sdxl"},
            "training": {"max_steps": 1},
            "datasets": [dataset],
        }
    )


def fill_caches(folder: Path) -> None:
    """Store the scan and a small entry for everything the run needs, as a first run would leave them."""
    config = _config(folder)
    index = build_index(config, _GEOMETRY, scans=scan_folder(config))
    with Caches(cache_folders(config), writable=True) as caches:
        wanted = needs(config, index, _KnownEncoders(), caches.folders)
        for items in (wanted.latents, wanted.texts):
            with caches.store(items[0].folder).writer() as writer:
                for item in items:
                    writer.add(item.origin, {"latents": torch.zeros(4)}, key=item.key)


def _seconds(task: str, folder: Path, machine: Machine, cores: list[int]) -> Spent:
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import {measure.__name__} as work; work()", task, str(folder),
         ",".join(map(str, cores))],
        input=machine.model_dump_json(), stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise MachineError(f"bench data: the process for `{task}` failed: its messages are above")
    wall, cpu = map(float, done.stdout.split())
    return Spent(wall, cpu)


def measure() -> None:
    """Entry point of the measuring process."""
    task, folder, cores = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    machine = Machine.model_validate_json(sys.stdin.read())
    os.sched_setaffinity(0, map(int, cores.split(",")))
    config = _config(folder)
    start, before = time.perf_counter(), _cpu_seconds()
    if task == "scan":
        build_index(config, _GEOMETRY)
    else:
        _start_warm(config, machine)
    sys.stdout.write(f"{time.perf_counter() - start} {_cpu_seconds() - before}\n")


def _cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _start_warm(config: RunConfig, machine: Machine) -> None:
    """The steps of `train.load`, without a model."""
    index = build_index(config, _GEOMETRY, scans=scan_folder(config))
    with ExitStack() as stack:
        caches = stack.enter_context(Caches(cache_folders(config), writable=True))
        built = build(config, index, _KnownEncoders(), caches)
        load_caches(config, built.wanted, caches, CacheResources(machine), stack, name="0")
        loader = Loader(built.index, batch_size=4)
        loader.state_dict()
        loader.next_batch()
