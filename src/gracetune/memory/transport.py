"""The transport of batches to the GPU: measure the link once per machine, then choose, with a reason.

The measured speeds are kept in a file, so that only the first run measures:

    <user's cache folder>/gracetune/link-speeds.json
    {"format": "gracetune-link-speeds", "version": 1,
     "machines": {"<GPU, driver, torch, profile>": {"seconds": .., "pinned_copy": .., ..}}}

The file is a cache. If it cannot be read or written, the next run measures again. It may be deleted at any time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final, Literal

from pydantic import TypeAdapter, ValidationError

from gracetune.hardware.machine import Machine, ProfileName
from gracetune.memory.experiment_tools import timed_ms
from gracetune.memory.lookahead import InPlace, Mover, RingMover, copies_on
from gracetune.memory.managed import Home, ManagedBuffer, ManagedHeap
from gracetune.storage.atomic import write_file
from gracetune.units import MIB

if TYPE_CHECKING:
    import torch

Transport = Literal["in_place", "pinned_copy", "managed_gather"]
PROBE_BYTES: Final = 64 * MIB
"""Bytes of each measured transfer."""
_CHUNK: Final = MIB
_REPEATS: Final = 5


@dataclass(frozen=True)
class TransportPath:
    """Measurements of one method of transfer from host memory to the GPU."""

    rate: float
    """GB/s while the GPU is idle."""
    hidden: float
    """The fraction of the transfer time that overlaps with a step of the same length; 0 to 1."""

    def __str__(self) -> str:
        return f"{self.rate:.0f} GB/s, {self.hidden:.0%} hidden"


@dataclass(frozen=True)
class ManagedSpeeds:
    """Measurements of managed memory."""

    gather: TransportPath
    """Copying from managed memory that stays on the host. If the GPU's cores do the copying, nothing overlaps."""
    prefetch: TransportPath
    """Migrating whole pages. Reading them afterwards is free, but migrating them back costs time. This suits caches
    that move to the GPU as a whole, not single batches."""
    prefetch_to_host: float
    """GB/s in the other direction."""


@dataclass(frozen=True)
class LinkSpeeds:
    """All measurements of a link."""

    pinned_copy: TransportPath
    pinned_copy_to_host: float
    """GB/s in the other direction."""
    managed: ManagedSpeeds | None = None
    """None if managed memory was not measured."""


@dataclass(frozen=True)
class TransportChoice:
    """The chosen transport, and why."""

    transport: Transport
    reason: str
    speeds: LinkSpeeds | None = None
    """The measurements behind the choice; None if it needed none or measuring was impossible."""

    @property
    def prefers_pinned(self) -> bool:
        """Whether pinned copies were measured against managed memory and are better."""
        return self.transport == "pinned_copy" and self.speeds is not None and self.speeds.managed is not None


HIDES_ENOUGH: Final = 0.85
"""Fraction of a transfer that must overlap with the step."""


def choose_transport(profile: ProfileName, speeds: LinkSpeeds | None, *, request: str | None = None) -> TransportChoice:
    """Choose the transport. Pure: the profile determines what is possible, the measurement what is fast.

    Copy engines support pinned copies on every GPU. Gathering from managed slabs avoids pinning. It is chosen on a
    coherent machine if it is nearly as fast and does not occupy the GPU's cores, or if the config requests managed
    memory explicitly. `request` then quotes that setting.
    """
    if profile == "cpu":
        return TransportChoice("in_place", "no GPU: batches are read in place")
    if profile == "integrated":
        return TransportChoice("in_place", "one pool: batches are read in place, nothing is copied to the GPU")
    if request is not None and (speeds is None or speeds.managed is not None):
        measured = "" if speeds is None or speeds.managed is None else f": {speeds.managed.gather}"
        measured += "" if speeds is None else f"; pinned copies reach {speeds.pinned_copy}"
        return TransportChoice("managed_gather", f"{request}{measured}", speeds)
    if speeds is None:
        return TransportChoice("pinned_copy", "hidden behind the step wherever it was measured; not measured here")
    pinned = speeds.pinned_copy
    if speeds.managed is None:
        return TransportChoice("pinned_copy", f"pinned copies reach {pinned}; no managed memory was requested", speeds)
    gather = speeds.managed.gather
    comparison = f"{gather}, against {pinned} for pinned copies"
    if profile == "superchip" and gather.rate >= 0.85 * pinned.rate and gather.hidden >= HIDES_ENOUGH:
        return TransportChoice("managed_gather", f"gathering from managed memory reaches {comparison}", speeds)
    return TransportChoice("pinned_copy", f"gathering from managed memory would reach {comparison}", speeds)


def mover_for(choice: TransportChoice, device: torch.device) -> Mover:
    """The mover of a transport. For managed_gather it is the same as for pinned copies: the sources are then CUDA views
    of managed memory."""
    if choice.transport == "in_place" or device.type != "cuda":
        return InPlace(device, lend=True)
    return RingMover(device)


@dataclass(frozen=True)
class MeasuredTransport:
    speeds: LinkSpeeds
    seconds: float
    """How long the measurement took."""


def measure_link(device: int, heap: ManagedHeap | None, size: int = PROBE_BYTES) -> MeasuredTransport:
    """Time each transfer method, alone and next to a step of the same duration.

    Temporarily allocates `size` bytes on the GPU and in pinned memory, and in managed memory if there is a `heap`.
    """
    import torch

    began = time.perf_counter()
    gpu = torch.device("cuda", device)
    copy_stream = torch.cuda.Stream(gpu)
    target = torch.zeros(size, dtype=torch.uint8, device=gpu)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(7)

    copy_bytes = copies_on(copy_stream)

    def copy_from(source: torch.Tensor) -> Callable[[], None]:
        """Copy as `RingMover` does, in pieces of about the size of a sample."""

        def copy() -> None:
            with torch.cuda.stream(copy_stream):
                if copy_bytes is None:
                    target.copy_(source, non_blocking=True)
                else:
                    starts = range(0, size, _CHUNK)
                    to, origin = target.data_ptr(), source.data_ptr()
                    sizes = [min(_CHUNK, size - start) for start in starts]
                    copy_bytes([to + start for start in starts], [origin + start for start in starts], sizes)

        return copy

    def managed(heap: ManagedHeap) -> ManagedSpeeds:
        separate_heap = ManagedHeap(heap.uvm, device, heap.quiesce)  # keeps the probe out of the run's counters
        with separate_heap.empty((size,), torch.uint8, "host") as buffer:
            buffer.cpu().fill_(7)
            to_host, to_device = _prefetching(buffer, "host", copy_stream), _prefetching(buffer, "device", copy_stream)
            gather = _measured_path(size, device, copy_from(buffer.cuda()))
            prefetch = _measured_path(size, device, to_device, before=to_host)
            back = _median_ms(device, to_host, to_device)
            to_host()
            heap.quiesce()
            return ManagedSpeeds(gather, prefetch, prefetch_to_host=size / back / 1e6)

    speeds = LinkSpeeds(
        pinned_copy=_measured_path(size, device, copy_from(pinned)),
        pinned_copy_to_host=size / _median_ms(device, lambda: pinned.copy_(target, non_blocking=True)) / 1e6,
        managed=None if heap is None else managed(heap),
    )
    return MeasuredTransport(speeds, time.perf_counter() - began)


def _prefetching(buffer: ManagedBuffer, home: Home, stream: torch.cuda.Stream) -> Callable[[], object]:
    return lambda: buffer.prefetch(home, stream.cuda_stream)


def _measured_path(
    size: int, device: int, move: Callable[[], object], before: Callable[[], object] = lambda: None
) -> TransportPath:
    """Measure one method. `before` restores the initial location of the bytes; its time is not counted.

    hidden = 1 - (time of move and step together - time of step) / time of move.
    """
    alone = _median_ms(device, move, before)
    step = matmul_step(alone, device)
    length = _median_ms(device, step, before)

    def beside() -> None:
        move()
        step()

    together = _median_ms(device, beside, before)
    return TransportPath(rate=size / alone / 1e6, hidden=min(1.0, max(0.0, 1 - (together - length) / alone)))


def _median_ms(device: int, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Median time, without the first repetition, which includes one-time costs."""
    times = []
    for _ in range(_REPEATS + 1):
        before()
        times.append(timed_ms(work, device))
    return median(times[1:])


def matmul_step(milliseconds: float, device: int, side: int = 3072) -> Callable[[], None]:
    """A synthetic step: matrix products that keep the GPU busy for about that long. A larger `side` needs fewer
    kernel launches.

    The matrices are zero. Other values draw more power, and at its power limit a GPU changes its clock by more than the
    effect measured here.
    """
    import torch

    matrix = torch.zeros(side, side, device=f"cuda:{device}", dtype=torch.bfloat16)
    result = torch.empty_like(matrix)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix, out=result)

    products(50)
    count = math.ceil(milliseconds / (timed_ms(lambda: products(200), device) / 200))
    return lambda: products(count)


# -- the file of measured speeds ---------------------------------------------------------------------------------------


FILE: Final = "link-speeds.json"


@dataclass(frozen=True)
class _SpeedsFile:
    format: Literal["gracetune-link-speeds"]
    version: Literal[1]
    machines: dict[str, MeasuredTransport]


_SPEEDS_FILE: Final = TypeAdapter(_SpeedsFile)


def machine_key(machine: Machine, device: int) -> str:
    """A description of everything that the speeds depend on. If any of it changes, a run measures again."""
    gpu = next((gpu for gpu in machine.gpus if gpu.index == device), None)
    software, host = machine.software, machine.host
    parts = {
        "GPU": gpu.name if gpu else None,
        "PCI": gpu.pci_address if gpu else None,
        "driver": host.nvidia_kernel_driver,
        "CUDA": machine.driver.cuda_version,
        "torch": software.torch,
        "host": f"{host.cpu_model or host.architecture} {host.mem_total}",
        "profile": f"{machine.profile.value}, {machine.memory_mode.value}",
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def recall(folder: Path, key: str, *, with_managed: bool) -> MeasuredTransport | None:
    """The stored measurement; None if there is none or if it lacks a required measurement of managed memory."""
    found = _read_speeds(folder).get(key)
    return None if found is None or (with_managed and found.speeds.managed is None) else found


def remember(folder: Path, key: str, measured: MeasuredTransport) -> str | None:
    """Store a measurement. Returns the reason if that failed, else None."""
    content = _SpeedsFile("gracetune-link-speeds", 1, {**_read_speeds(folder), key: measured})
    target = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(target, _SPEEDS_FILE.dump_json(content, indent=1))
    except OSError as error:
        return f"{target}: {error.strerror}"
    return None


def _read_speeds(folder: Path) -> dict[str, MeasuredTransport]:
    try:
        return _SPEEDS_FILE.validate_json((folder / FILE).read_bytes()).machines
    except (OSError, ValidationError):
        return {}
