"""How batches reach the GPU: measured on this machine, then chosen, with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final, Literal

from gracetune.hardware.machine import ProfileName
from gracetune.memory.lookahead import InPlace, Mover, RingMover
from gracetune.memory.managed import Home, ManagedHeap
from gracetune.memory.trial import timed_ms
from gracetune.units import MIB

if TYPE_CHECKING:
    import torch

Transport = Literal["in_place", "pinned_copy", "managed_gather"]
PROBE_BYTES: Final = 128 * MIB
_REPEATS = 5


@dataclass(frozen=True)
class Way:
    """One way from host memory to the GPU."""

    rate: float
    """GB/s with the GPU idle."""
    hidden: float
    """The part of a transfer that disappears behind a step of the same length; 0 to 1."""


@dataclass(frozen=True)
class LinkSpeeds:
    """The ways as measured here."""

    pinned_copy: Way
    managed_gather: Way
    """Reading managed memory that stays in host memory. Where the GPU's own cores do that, nothing is hidden."""
    managed_prefetch: Way
    """Whole pages moved; reading them afterwards is free, bringing them back is not."""
    pinned_copy_to_host: float
    """GB/s the other way."""
    managed_prefetch_to_host: float


@dataclass(frozen=True)
class TransportChoice:
    transport: Transport
    reason: str


HIDES_ENOUGH: Final = 0.85


def choose_transport(profile: ProfileName, speeds: LinkSpeeds | None) -> TransportChoice:
    """Pure: the profile says what is possible, the measurement what is fast.

    A pinned copy is what the copy engines do everywhere. Gathering from managed slabs saves the pinning, so it is
    taken on a coherent machine if it is nearly as fast there and leaves the GPU's cores to the step.
    """
    if profile in ("cpu", "integrated"):
        return TransportChoice("in_place", "one memory: nothing to copy")
    if speeds is None:
        return TransportChoice("pinned_copy", "hidden behind the step wherever it was measured; not measured here")
    pinned, gather = speeds.pinned_copy, speeds.managed_gather
    told = f"{gather.rate:.0f} GB/s, {gather.hidden:.0%} hidden, against {pinned.rate:.0f} and {pinned.hidden:.0%}"
    if profile == "superchip" and gather.rate >= 0.85 * pinned.rate and gather.hidden >= HIDES_ENOUGH:
        return TransportChoice("managed_gather", f"reading in place does {told} for pinned copies")
    return TransportChoice("pinned_copy", f"reading in place would do {told} for pinned copies")


def mover_for(choice: TransportChoice, device: torch.device) -> Mover:
    return InPlace(device) if choice.transport == "in_place" else RingMover(device)


def measure_link(heap: ManagedHeap, size: int = PROBE_BYTES) -> LinkSpeeds:
    """Time each way, alone and beside a step of its length. Holds `size` bytes of managed memory for a moment."""
    import torch

    device = torch.device("cuda", heap.device)
    side = torch.cuda.Stream(device)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    pinned = torch.randint(0, 255, (size,), dtype=torch.uint8).pin_memory()

    def copy_from(source: torch.Tensor) -> Callable[[], None]:
        def copy() -> None:
            with torch.cuda.stream(side):
                target.copy_(source, non_blocking=True)

        return copy

    with heap.empty((size,), torch.uint8, "host") as buffer:
        buffer.cpu().copy_(pinned)

        def send(where: Home) -> Callable[[], object]:
            return lambda: buffer.prefetch(where, side.cuda_stream)

        return LinkSpeeds(
            pinned_copy=_way(size, heap.device, copy_from(pinned)),
            managed_gather=_way(size, heap.device, copy_from(buffer.cuda())),
            managed_prefetch=_way(size, heap.device, send("device"), before=send("host")),
            pinned_copy_to_host=size / _median_ms(heap.device, lambda: pinned.copy_(target, non_blocking=True)) / 1e6,
            managed_prefetch_to_host=size / _median_ms(heap.device, send("host"), send("device")) / 1e6,
        )


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
