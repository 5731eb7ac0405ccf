"""How batches reach the GPU: measured on this machine once, then chosen, with the reason."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final, Literal

from gracetune.hardware.machine import ProfileName
from gracetune.memory.lookahead import InPlace, Mover, RingMover, copies_on
from gracetune.memory.managed import Home, ManagedBuffer, ManagedHeap
from gracetune.memory.trial import timed_ms
from gracetune.units import MIB

if TYPE_CHECKING:
    import torch

Transport = Literal["in_place", "pinned_copy", "managed_gather"]
PROBE_BYTES: Final = 64 * MIB
_PIECE: Final = MIB
_REPEATS: Final = 5


@dataclass(frozen=True)
class Way:
    """One way from host memory to the GPU."""

    rate: float
    """GB/s with the GPU idle."""
    hidden: float
    """The part of a transfer that disappears behind a step of the same length; 0 to 1."""

    def __str__(self) -> str:
        return f"{self.rate:.0f} GB/s, {self.hidden:.0%} hidden"


@dataclass(frozen=True)
class ManagedSpeeds:
    """The ways of managed memory."""

    gather: Way
    """Reading managed memory that stays in host memory. Where the GPU's own cores do that, nothing is hidden."""
    prefetch: Way
    """Whole pages moved; reading them afterwards is free, bringing them back is not. For caches that move to the GPU
    as a whole; a batch's pages would have to go back one by one."""
    prefetch_to_host: float
    """GB/s the other way."""


@dataclass(frozen=True)
class LinkSpeeds:
    """The ways as measured here."""

    pinned_copy: Way
    pinned_copy_to_host: float
    """GB/s the other way."""
    managed: ManagedSpeeds | None = None
    """None where no managed memory was asked for."""


@dataclass(frozen=True)
class TransportChoice:
    transport: Transport
    reason: str
    speeds: LinkSpeeds | None = None
    """What the choice was made from; None where nothing had to be measured, or could be."""

    @property
    def prefers_pinned(self) -> bool:
        """Measured against managed memory, and found better."""
        return self.transport == "pinned_copy" and self.speeds is not None and self.speeds.managed is not None


HIDES_ENOUGH: Final = 0.85


def choose_transport(
    profile: ProfileName, speeds: LinkSpeeds | None, *, insisted: str | None = None
) -> TransportChoice:
    """Pure: the profile says what is possible, the measurement what is fast.

    A pinned copy is what the copy engines do everywhere. Gathering from managed slabs saves the pinning, so it is
    taken on a coherent machine if it is nearly as fast there and leaves the GPU's cores to the step, or where managed
    slabs were asked for by name: `insisted` says how.
    """
    if profile == "cpu":
        return TransportChoice("in_place", "no GPU: batches are read in place")
    if profile == "integrated":
        return TransportChoice("in_place", "one pool: batches are read in place, nothing is copied to the GPU")
    if insisted is not None and (speeds is None or speeds.managed is not None):
        told = "" if speeds is None or speeds.managed is None else f": {speeds.managed.gather}"
        told += "" if speeds is None else f"; pinned copies reach {speeds.pinned_copy}"
        return TransportChoice("managed_gather", f"{insisted}{told}", speeds)
    if speeds is None:
        return TransportChoice("pinned_copy", "hidden behind the step wherever it was measured; not measured here")
    pinned = speeds.pinned_copy
    if speeds.managed is None:
        return TransportChoice("pinned_copy", f"pinned copies reach {pinned}; no managed memory was asked for", speeds)
    gather = speeds.managed.gather
    told = f"{gather}, against {pinned} for pinned copies"
    if profile == "superchip" and gather.rate >= 0.85 * pinned.rate and gather.hidden >= HIDES_ENOUGH:
        return TransportChoice("managed_gather", f"reading managed memory in place reaches {told}", speeds)
    return TransportChoice("pinned_copy", f"reading managed memory in place would reach {told}", speeds)


def mover_for(choice: TransportChoice, device: torch.device) -> Mover:
    if choice.transport == "in_place" or device.type != "cuda":
        return InPlace(device, lend=True)
    return RingMover(device)


@dataclass(frozen=True)
class Measured:
    speeds: LinkSpeeds
    seconds: float


def measure_link(device: int, heap: ManagedHeap | None, size: int = PROBE_BYTES) -> Measured:
    """Time each way, alone and beside a step of its length. Holds `size` bytes on the GPU and in pinned memory for a
    moment, and as many of managed memory where there is a `heap`."""
    import torch

    began = time.perf_counter()
    where = torch.device("cuda", device)
    side = torch.cuda.Stream(where)
    target = torch.zeros(size, dtype=torch.uint8, device=where)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(7)

    copy_bytes = copies_on(side)

    def copy_from(source: torch.Tensor) -> Callable[[], None]:
        """As the ring does it, in pieces as large as samples."""

        def copy() -> None:
            with torch.cuda.stream(side):
                if copy_bytes is None:
                    target.copy_(source, non_blocking=True)
                else:
                    starts = range(0, size, _PIECE)
                    to, come = target.data_ptr(), source.data_ptr()
                    sizes = [min(_PIECE, size - start) for start in starts]
                    copy_bytes([to + start for start in starts], [come + start for start in starts], sizes)

        return copy

    def managed(heap: ManagedHeap) -> ManagedSpeeds:
        own = ManagedHeap(heap.uvm, device, heap.quiesce)  # what is measured is not counted as the run's
        with own.empty((size,), torch.uint8, "host") as buffer:
            buffer.cpu().fill_(7)
            to_host, to_device = _sending(buffer, "host", side), _sending(buffer, "device", side)
            gather = _way(size, device, copy_from(buffer.cuda()))
            prefetch = _way(size, device, to_device, before=to_host)
            back = _median_ms(device, to_host, to_device)
            to_host()
            heap.quiesce()
            return ManagedSpeeds(gather, prefetch, prefetch_to_host=size / back / 1e6)

    speeds = LinkSpeeds(
        pinned_copy=_way(size, device, copy_from(pinned)),
        pinned_copy_to_host=size / _median_ms(device, lambda: pinned.copy_(target, non_blocking=True)) / 1e6,
        managed=None if heap is None else managed(heap),
    )
    return Measured(speeds, time.perf_counter() - began)


def _sending(buffer: ManagedBuffer, home: Home, stream: torch.cuda.Stream) -> Callable[[], object]:
    return lambda: buffer.prefetch(home, stream.cuda_stream)


def _way(size: int, device: int, move: Callable[[], object], before: Callable[[], object] = lambda: None) -> Way:
    """`before` brings the bytes back to where the move starts, outside the time that is taken."""
    alone = _median_ms(device, move, before)
    step = matmul_step(alone, device)
    length = _median_ms(device, step, before)

    def beside() -> None:
        move()
        step()

    together = _median_ms(device, beside, before)
    return Way(rate=size / alone / 1e6, hidden=min(1.0, max(0.0, 1 - (together - length) / alone)))


def _median_ms(device: int, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        before()
        times.append(timed_ms(work, device))
    return median(times[1:])


def matmul_step(milliseconds: float, device: int, side: int = 3072) -> Callable[[], None]:
    """Matrix products that keep the GPU's cores busy for about that long; the larger, the fewer the host has to start.

    Of zeros: at its power limit, where other values take it, a GPU's clock wanders by more than what is measured here.
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
