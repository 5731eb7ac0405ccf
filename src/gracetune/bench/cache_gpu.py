"""Time that steps on a GPU wait for cached batches, with and without look-ahead, from pinned and managed slabs.

`wait_*` is GPU time between the request for a batch and its arrival. `loss_*` compares the whole loop with the same
steps alone, so it includes the cost of host work and copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from statistics import median
from typing import TYPE_CHECKING, Final

from gracetune.bench.cache import KEYS, visits_in
from gracetune.bench.row import BenchRow
from gracetune.cache.batches import Batch, BatchSource
from gracetune.cache.residence import CacheResources, CacheRole, Residence
from gracetune.cache.resident import ResidentStore, load_resident
from gracetune.cache.store import DiskStore
from gracetune.data.index import DataIndex
from gracetune.data.loader import Loader
from gracetune.hardware.machine import Machine
from gracetune.memory.experiment_tools import synchronize, timed_ms, torch_device
from gracetune.memory.managed import ManagedHeap
from gracetune.memory.native import Unavailable, load
from gracetune.memory.placement import choose_placement
from gracetune.memory.transport import matmul_step
from gracetune.units import GIB, MIB

if TYPE_CHECKING:
    from torch import Tensor

STEP_MS: Final = 30.0
SIDE: Final = 8192
"""Side of the step's matrices. A step is a few dozen products, as in a large model: if launching it took the host as
long as the GPU needs to compute it, we would only measure the host."""
BATCH: Final = 64
"""Samples of 328 KiB each: 20.5 MiB, about a batch of video latents."""
STEPS: Final = 16
ROUNDS: Final = 4
WARM_UP: Final = 8
LOG_EVERY: Final = 8
"""Steps between synchronizations, since a training loop reads its loss now and then."""

_PINNED: Final = Residence("pinned_host", "measured here")
_MANAGED: Final = Residence("managed_host", "measured here")


def waiting_rows(disk: DiskStore, index: DataIndex, machine: Machine, device: int = 0) -> Iterator[BenchRow]:
    step = matmul_step(STEP_MS, device, SIDE)
    yield from _both_ways("pinned", disk, index, CacheResources(machine, device), _PINNED, step)
    uvm = load()
    if isinstance(uvm, Unavailable):
        yield BenchRow("wait_managed", 0.0, "", detail=f"not measured: managed memory is {uvm}")
        return
    uvm.set_managed_cap(4 * GIB)
    heap = ManagedHeap(uvm, device, lambda: synchronize(device))
    yield from _both_ways("managed", disk, index, CacheResources(machine, device, heap), _MANAGED, step)


def _both_ways(
    name: str,
    disk: DiskStore,
    index: DataIndex,
    resources: CacheResources,
    residence: Residence,
    step: Callable[[], None],
) -> Iterator[BenchRow]:
    with (
        _load(disk, index, "latent_cache", resources, residence) as latents,
        _load(disk, index, "text_cache", resources, residence) as texts,
    ):
        if latents.report.residence.kind != residence.kind:
            yield BenchRow(f"wait_{name}", 0.0, "", detail="not measured: " + "; ".join(latents.report.lines()))
            return
        # With and without look-ahead.
        ahead, behind = (_measure_waits(index, latents, texts, resources, step, depth) for depth in (2, 0))
    # If this machine does not keep caches in managed memory, its loss is shown without a bar.
    chosen = choose_placement("latent_cache", resources.profile).kind == residence.kind
    yield BenchRow(f"wait_{name}", ahead.share, "% of a step", "< 1", ahead.share < 1, ahead.detail)
    yield BenchRow(f"wait_{name}_no_look_ahead", behind.share, "% of a step", detail=behind.detail)
    ok = ahead.loss < 1 if chosen else None
    yield BenchRow(f"loss_{name}", ahead.loss, "% of a step", "< 1" if chosen else "", ok, ahead.loop)
    yield BenchRow(f"loss_{name}_no_look_ahead", behind.loss, "% of a step", detail=behind.loop)


def _load(
    disk: DiskStore, index: DataIndex, role: CacheRole, resources: CacheResources, residence: Residence
) -> ResidentStore:
    visits = visits_in(index, role)
    return load_resident(
        [disk], visits, name=role, role=role, kind="unified_memory", resources=resources, residence=residence
    )


@dataclass(frozen=True)
class _WaitMeasurement:
    share: float
    """Time spent waiting, in percent of the loop."""
    loss: float
    """Percent by which the loop is longer than its steps alone."""
    detail: str
    loop: str


def _measure_waits(
    index: DataIndex,
    latents: ResidentStore,
    texts: ResidentStore,
    resources: CacheResources,
    step: Callable[[], None],
    depth: int,
) -> _WaitMeasurement:
    """Alternate rounds of the loop and of the steps alone, because GPU clocks drift by more than the difference."""
    assert resources.device is not None
    device = resources.device
    loader = Loader(index, batch_size=BATCH)
    with BatchSource(
        loader, latents=latents, texts=texts, keys=KEYS, device=torch_device(device), depth=depth
    ) as source:
        batches = _batches(source)
        same = {name: tensor.clone() for name, tensor in next(batches).items()}
        _loop(batches, step, WARM_UP, device)
        loops, alone = [], []
        synchronize(device)
        began = time.perf_counter()
        step()
        started = 1000 * (time.perf_counter() - began)
        before = source.stats
        for number in range(ROUNDS):
            for kind in ("loop", "alone") if number % 2 else ("alone", "loop"):
                if kind == "loop":
                    loops.append(timed_ms(lambda: _loop(batches, step, STEPS, device), device) / STEPS)
                else:
                    alone.append(timed_ms(lambda: _loop(repeat(same), step, STEPS, device), device) / STEPS)
        after = source.stats
    share = 100 * (after.wait_ms - before.wait_ms) / (STEPS * sum(loops))
    loss = 100 * (median(one / other for one, other in zip(loops, alone, strict=True)) - 1)
    size = sum(tensor.nbytes for tensor in same.values())
    detail = f"batches of {size / MIB:.1f} MiB; host {(after.host_ms - before.host_ms) / STEPS / ROUNDS:.2f} ms a batch"
    return _WaitMeasurement(
        share,
        loss,
        detail,
        f"loop {median(loops):.2f} ms/step, {median(alone):.2f} the steps alone, {ROUNDS} rounds in turns; "
        f"starting a step takes the host {started:.2f} ms",
    )


def _batches(source: BatchSource) -> Iterator[Mapping[str, Tensor]]:
    while True:
        outcome = source.next()
        if isinstance(outcome, Batch):
            yield outcome.tensors


def _loop(batches: Iterator[Mapping[str, Tensor]], step: Callable[[], None], count: int, device: int) -> None:
    for number in range(count):
        for tensor in next(batches).values():
            tensor.view(-1)[:1].add_(1)  # the step depends on the batch, so it cannot start before the data has arrived
        step()
        if number % LOG_EVERY == LOG_EVERY - 1:
            synchronize(device)
