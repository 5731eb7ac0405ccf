"""`gracetune bench loading`: load a denoiser of real size from a sharded folder, and measure time and host memory.

The weights are those of Wan's 14B transformer in bfloat16 with random values, in a temporary folder that is removed.
Host memory counts anonymous and shared pages of this process, and pages pinned through torch. It does not count the
page cache, which the kernel reclaims when needed; the loader asks the kernel to drop it anyway.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import WanTransformer3DModel
from torch import nn

from gracetune.bench.row import BenchRow
from gracetune.errors import MachineError
from gracetune.hardware.machine import Machine
from gracetune.memory.weights.loading import CHUNK, MAX_THREADS, open_weights
from gracetune.models.loading import load_component
from gracetune.models.source import ModelSource
from gracetune.models.spec import PartPlacement
from gracetune.storage.atomic import sync_file
from gracetune.storage.safetensors_files import open_tensors, write_tensors
from gracetune.units import GIB, MIB, format_bytes

BAR: Final = 1.1
SHARD_BYTES: Final = 5 * GIB
"""Shard size of published folders of this size."""
_STEM = "diffusion_pytorch_model"
_COMPONENT = "transformer"
_SAMPLE_SECONDS = 0.002


@dataclass(frozen=True)
class DenoiserSize:
    """Dimensions of the transformer; the defaults are the published ones."""

    layers: int = 40
    heads: int = 40
    ffn: int = 13824
    shard_bytes: int = SHARD_BYTES

    def config(self) -> dict[str, Any]:
        return {"num_layers": self.layers, "num_attention_heads": self.heads, "ffn_dim": self.ffn}

    @property
    def weight_bytes(self) -> int:
        model: nn.Module = _on_meta(self)
        return 2 * sum(parameter.numel() for parameter in model.parameters())


SMALL: Final = DenoiserSize(layers=2, heads=4, ffn=2048, shard_bytes=16 * MIB)
"""A size that a machine without a GPU measures within seconds."""


def run(machine: Machine) -> list[BenchRow]:
    """Measure the published size on a GPU, otherwise a small one; the rows name the size."""
    if not torch.cuda.is_available():
        return measure(torch.device("cpu"), SMALL, Path(tempfile.gettempdir()))
    return measure(torch.device("cuda", 0), DenoiserSize(), Path(tempfile.gettempdir()))


def measure(device: torch.device, size: DenoiserSize, parent: Path) -> list[BenchRow]:
    """Measure in a temporary folder inside `parent`, whose disk needs room for the weights."""
    _check_room(device, size, parent)
    folder = Path(tempfile.mkdtemp(prefix="gracetune-bench-", dir=parent))
    try:
        files = write_weights(folder, size, device)
        return list(_rows(device, size, folder, files))
    finally:
        shutil.rmtree(folder)


def _check_room(device: torch.device, size: DenoiserSize, parent: Path) -> None:
    if not parent.is_dir():
        raise MachineError(f"bench loading needs a folder to write into; {parent} is none\n  try  mkdir -p {parent}")
    needed = size.weight_bytes
    free = shutil.disk_usage(parent).free
    if free < needed * 1.05:
        raise MachineError(
            f"bench loading writes {format_bytes(needed)} of weights; {parent} has {format_bytes(free)} free\n"
            "  try  TMPDIR=FOLDER gracetune bench loading, with a folder on a larger disk"
        )
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < needed * 1.05:
        raise MachineError(
            f"bench loading puts {format_bytes(needed)} of weights on the GPU, which has "
            f"{format_bytes(torch.cuda.mem_get_info(device)[0])} free\n"
            "  try  python benchmarks/load_14b.py --layers 10, or free the GPU"
        )


# -- weights to load ---------------------------------------------------------------------------------------------------


def write_weights(folder: Path, size: DenoiserSize, device: torch.device) -> list[Path]:
    """Write a folder in diffusers' layout, shard by shard, and return its files in order.

    `device` generates the values.
    """
    model = _on_meta(size)
    part = folder / _COMPONENT
    part.mkdir()
    config = {**dict(model.config), "_class_name": "WanTransformer3DModel"}
    (part / "config.json").write_text(json.dumps(config))
    (folder / "model_index.json").write_text(json.dumps({_COMPONENT: ["diffusers", "WanTransformer3DModel"]}))
    shards = _shards(model, size.shard_bytes)
    generator = torch.Generator(device).manual_seed(0)
    files: list[Path] = []
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards, 1):
        file = part / f"{_STEM}-{index:05}-of-{len(shards):05}.safetensors"
        shapes = {name: model.get_parameter(name).shape for name in names}
        write_tensors(file, {name: _random_tensor(shape, generator) for name, shape in shapes.items()})
        weight_map |= dict.fromkeys(names, file.name)
        files.append(file)
    index_file = part / f"{_STEM}.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


def _on_meta(size: DenoiserSize) -> Any:
    with torch.device("meta"):
        return WanTransformer3DModel(**size.config())


def _shards(model: nn.Module, limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, parameter in model.named_parameters():
        size = 2 * parameter.numel()
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _random_tensor(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    values = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return values.normal_(std=0.02, generator=generator).cpu()


# -- measuring ---------------------------------------------------------------------------------------------------------


def _rows(device: torch.device, size: DenoiserSize, folder: Path, files: list[Path]) -> Iterator[BenchRow]:
    stored = sum(file.stat().st_size for file in files)
    largest = max(file.stat().st_size for file in files)
    source = ModelSource("bench", folder)
    torch.zeros(1, device=device).to(torch.bfloat16)  # creates the CUDA context, which belongs to the baseline
    reads = [_cold_seconds(files, lambda: _read_plainly(files), device)]
    peak = _Peak(device)
    loaded: list[nn.Module] = []

    def load() -> None:
        with peak.watched():
            loaded.append(
                load_component(source, _COMPONENT, WanTransformer3DModel, PartPlacement(device, torch.bfloat16))
            )

    seconds = _cold_seconds(files, load, device)
    reads.append(_cold_seconds(files, lambda: _read_plainly(files), device))
    wrong = _wrong_tensors(loaded[0], folder)
    weights = sum(tensor.nbytes for tensor in loaded[0].parameters()) if device.type == "cpu" else 0
    extra = max(0, peak.above_baseline - weights)
    ratio = extra / largest
    beyond = " beyond the weights themselves, which are there to stay" if weights else ""
    yield BenchRow("weights", stored / 1e9, "GB", detail=f"{len(files)} shards, the largest {format_bytes(largest)}")
    yield BenchRow(
        "host_peak_over_shard", ratio, "ratio", f"<= {BAR}", ratio <= BAR,
        f"{format_bytes(extra)} above the baseline of {format_bytes(peak.baseline)}{beyond}",
    )  # fmt: skip
    yield BenchRow("load", stored / seconds / 1e9, "GB/s", detail=f"{seconds:.2f} s onto {device}")
    yield BenchRow("plain_read", stored / min(reads) / 1e9, "GB/s", detail=_rates_text(reads))
    yield BenchRow("load_over_plain_read", seconds / min(reads), "of the time")
    yield BenchRow("wrong_tensors", float(wrong), "tensors", "== 0", wrong == 0, "every 25th compared with the file")


def _rates_text(reads: list[float]) -> str:
    each = " and ".join(f"{read:.2f}" for read in reads)
    return f"{each} s before and after, {_threads()} threads; the page cache is dropped before each measurement"


def _cold_seconds(files: list[Path], work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work` takes while the files are not in the page cache."""
    for file in files:
        _drop_page_cache(file)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _drop_page_cache(file: Path) -> None:
    sync_file(file)  # dirty pages cannot be dropped
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _threads() -> int:
    """As many threads as the loader uses."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def _read_plainly(files: list[Path]) -> None:
    """Read every byte once into reused buffers: the upper limit of read speed."""
    chunks = [(file, offset) for file in files for offset in range(0, file.stat().st_size, CHUNK)]
    local = threading.local()

    def read(chunk: tuple[Path, int]) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = bytearray(CHUNK)
        file, offset = chunk
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.preadv(descriptor, [local.buffer], offset)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(_threads()) as pool:
        for _ in pool.map(read, chunks):
            pass


def _wrong_tensors(model: nn.Module, folder: Path) -> int:
    """How many of every 25th tensor differ from the file."""
    parameters = dict(model.named_parameters())
    entries = open_weights(folder / _COMPONENT / f"{_STEM}.safetensors.index.json").entries
    wrong = 0
    for name in list(entries)[::25]:
        with open_tensors(entries[name].path) as file:
            stored = file.get_tensor(name)
        wrong += not torch.equal(parameters[name].cpu(), stored.to(parameters[name].dtype))
    return wrong


class _Peak:
    """Samples the host memory of this process and keeps the peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.baseline = self.highest = self._now()

    @property
    def above_baseline(self) -> int:
        return self.highest - self.baseline

    def _now(self) -> int:
        pinned = 0
        if self._device.type == "cuda":
            pinned = int(torch.cuda.host_memory_stats()["allocated_bytes.current"])
        return own_pages() + pinned

    @contextmanager
    def watched(self) -> Iterator[None]:
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_SAMPLE_SECONDS):
                self.highest = max(self.highest, self._now())

        _return_freed_pages()
        self.baseline = self.highest = self._now()
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
            self.highest = max(self.highest, self._now())


def _return_freed_pages() -> None:
    """Return freed memory to the system. Memory that malloc keeps would hide part of what the load needs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def own_pages() -> int:
    """Bytes of anonymous and shared pages of this process. Pages of mapped files belong to the page cache."""
    total = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            total += int(line.split()[1]) * 1024
    return total
