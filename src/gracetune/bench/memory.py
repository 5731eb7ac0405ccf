"""`gracetune bench memory`: the benefit of the unified-memory layer on this GPU, as ratios within one run.

Uses at most 2 GiB of managed memory, and never more than the GPU has free. PyTorch's memory fraction simulates a full
GPU; the GPU is never really oversubscribed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING, Final, TypeAlias

from gracetune.bench.overflow import overhead_rows, spill_rows
from gracetune.bench.row import BenchRow
from gracetune.errors import MachineError
from gracetune.hardware.machine import Machine
from gracetune.memory.experiment_tools import synchronize, timed_ms, torch_device
from gracetune.memory.lookahead import LookAhead, RingMover
from gracetune.memory.managed import ManagedHeap
from gracetune.memory.native import HOST, Advice, Unavailable, load
from gracetune.memory.transport import LinkSpeeds, TransportChoice, choose_transport, matmul_step, measure_link
from gracetune.units import GIB, MIB

if TYPE_CHECKING:
    import torch

    Batch: TypeAlias = Mapping[str, torch.Tensor]

LINK_BYTES: Final = 1 * GIB
BATCH_BYTES: Final = 128 * MIB
BATCHES: Final = 8
ROUNDS: Final = 8


def run(machine: Machine, device: int = 0) -> list[BenchRow]:
    """All rows, in the order of the documentation."""
    uvm = load()
    if isinstance(uvm, Unavailable):
        raise MachineError(f"bench memory needs unified memory, which is {uvm}")
    uvm.set_managed_cap(4 * GIB)
    heap = ManagedHeap(uvm, device, lambda: synchronize(device))
    speeds = measure_link(device, heap, LINK_BYTES).speeds
    choice = choose_transport(machine.profile.value, speeds)
    rows = [*_link_rows(choice, speeds), *_look_ahead_rows(heap, choice, speeds)]
    return [*rows, *spill_rows(machine, device), *overhead_rows(machine, device)]


def _link_rows(choice: TransportChoice, speeds: LinkSpeeds) -> Iterator[BenchRow]:
    managed = speeds.managed
    assert managed is not None, "measured with a heap"
    for name, speed in (
        ("pinned_copy", speeds.pinned_copy),
        ("managed_gather", managed.gather),
        ("managed_prefetch", managed.prefetch),
    ):
        yield BenchRow(
            f"{name}_h2d", speed.rate, "GB/s", detail=f"{speed.hidden:.0%} hidden behind a step of the same length"
        )
    yield BenchRow("pinned_copy_d2h", speeds.pinned_copy_to_host, "GB/s")
    yield BenchRow("managed_prefetch_d2h", managed.prefetch_to_host, "GB/s")
    ratio = managed.prefetch.rate / speeds.pinned_copy.rate
    yield BenchRow("prefetch_over_pinned", ratio, "ratio", ">= 0.85", ratio >= 0.85)
    yield BenchRow("transport", 0.0, "", detail=f"{choice.transport}: {choice.reason}")


def _look_ahead_rows(heap: ManagedHeap, choice: TransportChoice, speeds: LinkSpeeds) -> Iterator[BenchRow]:
    """Look-ahead over cached batches as in a training loop, with the transport chosen for this machine."""
    import torch

    host = torch.randint(0, 255, (BATCHES, BATCH_BYTES), dtype=torch.uint8)
    with heap.empty((BATCHES, BATCH_BYTES), torch.uint8, "host") as slab:
        slab.cpu().copy_(host)
        gather = choice.transport == "managed_gather"
        rows = list(slab.cuda()) if gather else list(host.pin_memory())
        sources = rows * ROUNDS  # one transfer per epoch has no step before it to hide behind
        speed = speeds.managed.gather if gather and speeds.managed else speeds.pinned_copy
        yield _look_ahead_row(speed.rate, sources, heap.device)
        del rows, sources
    faults = _fault_rate(heap)
    yield BenchRow("page_faults_h2d", faults, "GB/s", detail="reads of managed pages, neither mapped nor prefetched")
    yield BenchRow("look_ahead_over_faults", speed.rate / faults, "ratio", ">= 4", speed.rate / faults >= 4)


def _look_ahead_row(rate: float, sources: list[torch.Tensor], device: int) -> BenchRow:
    """The share of a transfer hidden behind a step of the same length.

    Without look-ahead the loop copies on the step's own stream.
    """
    transfer_ms = BATCH_BYTES / rate / 1e6
    products = _as_long_as(transfer_ms, len(sources), device)

    def step(batch: Batch) -> None:
        for tensor in batch.values():
            tensor[:1].add_(1)  # the step depends on the batch, so it cannot start before the data has arrived
        products()

    batches: list[Batch] = [{"latents": source} for source in sources]
    mover = RingMover(torch_device(device))

    def ahead() -> None:
        for batch in LookAhead(batches, mover, depth=2, most=2):
            step(batch)

    def behind() -> None:
        for source in sources:
            step({"latents": source.to(torch_device(device), non_blocking=True, copy=True)})

    def alone() -> None:
        for _ in sources:
            step({})

    ahead()
    each = {work.__name__: median(timed_ms(work, device) for _ in range(5)) for work in (alone, ahead, behind)}
    per_step = {name: total / len(sources) for name, total in each.items()}
    hidden = 1 - (per_step["ahead"] - per_step["alone"]) / transfer_ms
    detail = (
        f"transfer {transfer_ms:.2f} ms, step {per_step['alone']:.2f} ms; both with look-ahead "
        f"{per_step['ahead']:.2f}, without {per_step['behind']:.2f}"
    )
    return BenchRow("hidden_by_look_ahead", hidden, "of transfer", ">= 0.90", hidden >= 0.90, detail)


def _as_long_as(milliseconds: float, steps: int, device: int) -> Callable[[], None]:
    """A step that takes `milliseconds` within a loop.

    A single step would run at another GPU clock than many in a row.
    """
    target_ms = milliseconds
    for _ in range(4):
        step = matmul_step(target_ms, device)

        def loop(step: Callable[[], None] = step) -> None:
            for _ in range(steps):
                step()

        taken = timed_ms(loop, device) / steps
        if 1.0 <= taken / milliseconds <= 1.03:
            break
        target_ms *= milliseconds / taken * 1.01
    return step


def _fault_rate(heap: ManagedHeap) -> float:
    """GB/s of page faults: the CPU touched the pages last and there are no hints, so the GPU faults on every page."""
    import torch

    size = 512 * MIB
    with heap.empty((size,), torch.uint8, "host") as buffer:
        heap.uvm.advise(buffer.span, Advice.UNSET_ACCESSED_BY, heap.device)
        heap.uvm.advise(buffer.span, Advice.UNSET_PREFERRED_LOCATION, HOST)
        target = torch.empty(size // 8, dtype=torch.int64, device=f"cuda:{heap.device}")
        words = buffer.cuda().view(torch.int64)
        stream = torch.cuda.current_stream(heap.device).cuda_stream
        seconds = []
        for value in range(4):
            # Migrate to the GPU and back by CPU writes. That removes the GPU's mapping, as a first touch does.
            buffer.prefetch("device", stream)
            synchronize(heap.device)
            buffer.cpu().fill_(value)
            start = time.perf_counter()
            torch.bitwise_xor(words, 1, out=target)
            synchronize(heap.device)
            seconds.append(time.perf_counter() - start)
        del words
    return size / median(seconds[1:]) / 1e9
