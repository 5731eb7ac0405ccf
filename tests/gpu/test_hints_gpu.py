"""Residency hints and the way of a batch, in whole runs on a real GPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.bench import cache as bench
from gracetune.cache.batches import Batch, BatchSource
from gracetune.cache.residence import CacheResources, CacheRole
from gracetune.cache.resident import ResidentStore, load_resident
from gracetune.config.environment import Environment, make_cublas_deterministic
from gracetune.config.memory_options import MemoryOptions
from gracetune.config.run_config import RunConfig
from gracetune.data.loader import Loader
from gracetune.hardware import probe
from gracetune.hardware.machine import Profile
from gracetune.hostmem.slab import MemorySlab
from gracetune.memory.lookahead import LookAhead, RingMover
from gracetune.memory.managed import ManagedHeap, ManagedSlab
from gracetune.memory.native import HOST, RangeState, Uvm
from gracetune.memory.placement import Hints
from gracetune.memory.stacked import Stacked
from gracetune.memory.transport import FILE, choose_transport, measure_link, mover_for
from gracetune.memory.unified_memory import UnifiedMemory
from gracetune.telemetry.events import MemorySampled
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.train.run import RunOptions, train
from gracetune.train.view import CollectingView
from gracetune.units import MIB
from runs.made_runs import TinyModel, config_for
from runs.test_resume import losses

CUDA = torch.device("cuda", 0)
UNIFIED = {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"}

make_cublas_deterministic()  # before any test starts CUDA


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def sdxl(root: Path, tiny_model: TinyModel, **sections: Any) -> RunConfig:
    training = {"max_steps": 4, "compile": "off", "attention": "math"}
    given = {"logging": {"every_steps": 1, "trackers": []}, "training": training, **sections}
    return config_for("sdxl", tiny_model, root, **given)


class Watching(CollectingView):
    """Looks at all managed buffers of the run after its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: UnifiedMemory | None = None
        self.states: list[RangeState] = []

    def on_step(self, step: int, steps: int) -> None:
        if self.layer is not None and not self.states:
            heap = self.layer.heap
            self.states = [heap.uvm.range_state(block.span) for block in heap._live]

    def opened(self, layer: UnifiedMemory) -> None:
        self.layer = layer


def run(config: RunConfig, folder: Path, view: Watching | None = None) -> Watching:
    view = view or Watching()
    environment = Environment({"XDG_CACHE_HOME": str(folder)})
    train(config, environment=environment, options=RunOptions(report=False), view=view, on_memory=view.opened)
    return view


def counters(config: RunConfig) -> dict[str, float]:
    records = read_log(Path(config.output_dir) / "logs" / "events.jsonl").merged()
    found = [record.event.counters for record in records if isinstance(record.event, MemorySampled)]
    return dict(found[-1])


def test_the_switch_decides_in_whole_runs(uvm: Uvm, tiny_model: TinyModel, tmp_path: Path) -> None:
    """The plain run, hints on, hints off: the same losses; managed memory only in the one that asks for it."""
    plain = sdxl(tmp_path / "plain", tiny_model)
    on = sdxl(tmp_path / "on", tiny_model, cache=UNIFIED, memory={"enable_uvm_hints": True})
    off = sdxl(tmp_path / "off", tiny_model, cache=UNIFIED, memory={"enable_uvm_hints": False})
    run(plain, tmp_path)
    before = uvm.total_stats()
    hinted = run(on, tmp_path)
    gc.collect()  # the last batches under way hold views of the cache
    between = uvm.total_stats()
    refused = run(off, tmp_path)
    after = uvm.total_stats()

    assert losses(plain) == losses(on) == losses(off)
    stated = "\n".join(hinted.lines)
    assert "residency hints: on, memory.enable_uvm_hints is true" in stated
    assert "in managed_host" in stated, stated
    assert "placed on the GPU" in stated
    preferred = {state.preferred for state in hinted.states}
    assert preferred == {HOST, 0}, "read back from the driver: latents in host memory, text and masks on the GPU"
    assert all(state.accessed_by == (0,) for state in hinted.states)
    found = counters(on)
    assert found["uvm.hinted_bytes"] > 0
    assert found["uvm.hints_refused"] == 0
    assert found["uvm.prefetched_bytes"] > 0
    assert hinted.layer is not None
    assert not hinted.layer.has_arena, "caches and hints open the layer without an arena"
    assert between.live_bytes == before.live_bytes, "everything managed was given back"

    assert refused.layer is None
    assert after.allocations == between.allocations, "no managed bytes at all"
    stated = "\n".join(refused.lines)
    assert "residency hints: off, memory.enable_uvm_hints is false" in stated
    assert "cache type unified_memory is not used: memory.enable_uvm_hints is false" in stated


def test_the_way_is_measured_once_and_said(uvm: Uvm, tiny_model: TinyModel, tmp_path: Path) -> None:
    def way(name: str, **sections: Any) -> str:
        view = run(sdxl(tmp_path / name, tiny_model, **sections), tmp_path / "cache")
        return next(line for line in view.lines if line.startswith("batches: "))

    first = way("first")
    assert first.startswith("batches: pinned_copy, pinned copies reach ")
    assert "measured in " in first
    assert (tmp_path / "cache" / "gracetune" / FILE).is_file()
    assert "measured before" in way("second")
    requested = way("asked", cache=UNIFIED, memory={"enable_uvm_hints": True})
    assert requested.startswith("batches: managed_gather, managed memory was requested")
    assert "measured in " in requested, "managed memory was not measured before"


def test_measuring_takes_less_than_a_second(heap: ManagedHeap) -> None:
    measure_link(0, heap)  # cuBLAS, streams and the clock are awake from here on
    measured = measure_link(0, heap)
    assert measured.seconds < 1, measured
    assert measured.speeds.managed is not None
    assert heap.hints.bytes == 0, "what is measured is not counted as the run's"
    for way in (measured.speeds.pinned_copy, measured.speeds.managed.gather, measured.speeds.managed.prefetch):
        assert way.rate > 1
        assert 0 <= way.hidden <= 1


def test_a_slab_is_read_where_it_lies() -> None:
    """As on a machine with one pool; here the bytes come over the link."""
    slab = MemorySlab.own(4 * MIB, 0, in_place=True)
    slab.host.copy_(torch.arange(4 * MIB, dtype=torch.int64).to(torch.uint8))
    slab.settle()
    assert slab.view.is_cuda
    assert slab.view.data_ptr() == slab.host.data_ptr(), "no copy"
    assert not slab.notes
    held = torch.cuda.memory_allocated()
    chunk = slab.view[64 : 64 + 4096].view(torch.float32).view(2, 512)
    mover = mover_for(choose_transport("integrated", None), CUDA)
    (batch,) = LookAhead([{"latents": Stacked((1, 2, 512), torch.float32, (chunk,))}], mover)
    assert batch["latents"].data_ptr() == slab.host.data_ptr() + 64
    assert torch.cuda.memory_allocated() == held, "nothing was copied"
    assert torch.equal(batch["latents"].cpu().view(torch.uint8).flatten(), slab.host[64 : 64 + 4096])
    del batch, chunk
    slab.close()


def test_a_run_reads_in_place_on_what_it_takes_for_one_pool(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, pool = (
        sdxl(tmp_path / name, tiny_model, cache={"vae_cache_type": "memory", "text_cache_type": "memory"})
        for name in ("ring", "pool")
    )
    run(ring, tmp_path)
    machine = probe().model_copy(update={"profile": Profile(value="integrated", reason="for the test")})
    monkeypatch.setattr("gracetune.train.preflight.probe", lambda: machine)
    stated = "\n".join(run(pool, tmp_path).lines)
    assert "batches: in_place, one pool" in stated
    assert "in shared_host (one pool: read in place)" in stated
    assert "batches are copied" not in stated
    assert losses(ring) == losses(pool)


def test_a_cache_changes_its_home_without_waiting(heap: ManagedHeap) -> None:
    slab = ManagedSlab(heap, 64 * MIB, "host")
    slab.host.copy_(torch.arange(64 * MIB, dtype=torch.int64).to(torch.uint8))
    expected = slab.host.clone()
    stream = torch.cuda.Stream()
    assert slab._buffer.state().preferred == HOST
    torch.cuda.set_sync_debug_mode("error")
    began = time.perf_counter()
    try:
        assert slab.move("device", stream.cuda_stream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert time.perf_counter() - began < 1
    assert slab._buffer.state().preferred == 0
    seen = slab.view.clone()  # right while it is under way, too
    assert torch.equal(seen.cpu(), expected)
    assert slab.move("host", stream.cuda_stream)
    stream.synchronize()
    assert slab._buffer.state().preferred == HOST
    assert torch.equal(slab.host, expected)
    assert heap.hints.refused == 0
    del seen
    slab.close()


def test_a_cache_that_steps_wait_for_moves_to_the_gpu(uvm: Uvm, tmp_path: Path) -> None:
    """Steps that take no time wait for batches, because the stream that copies them has other work. The cache then
    moves to the GPU, and its bytes are the same."""
    machine, ring = probe(), RingMover(CUDA)
    layer = UnifiedMemory.open(MemoryOptions(), machine)
    assert isinstance(layer, UnifiedMemory)
    hints = Hints(True, "for the test", requested=True)
    resources, index, heard = CacheResources(machine, 0, layer.heap, hints=hints), bench.index_of(256), list[str]()
    with bench.open_filled_store(tmp_path / "cache", index) as disk:

        def loaded(role: CacheRole) -> ResidentStore:
            return load_resident(
                [disk], bench.visits_in(index, role), name=role, role=role, kind="unified_memory", resources=resources
            )

        with loaded("latent_cache") as latents, loaded("text_cache") as texts:
            slab = latents.managed
            assert slab is not None
            assert str(slab.home) == "host", latents.report.lines()
            expected = slab.host.clone()
            source = BatchSource(
                Loader(index, batch_size=64), latents=latents, texts=texts, keys=bench.KEYS, device=CUDA, memory=layer,
                mover=ring, on_decision=heard.append,
            )  # fmt: skip
            with source:
                for _ in range(2000):
                    with torch.cuda.stream(ring.stream):
                        torch.cuda._sleep(5_000_000)  # two or three milliseconds
                    outcome = source.next()
                    torch.cuda.current_stream().synchronize()  # the host does not run ahead of the steps
                    if isinstance(outcome, Batch):
                        outcome.tensors["latents"].view(-1)[:1].add_(1)
                    if heard:
                        break
            assert str(slab.home) == "device", heard
            assert heard[0].startswith("latent_cache: moves to the GPU: steps of "), heard
            torch.cuda.synchronize()
            assert slab._buffer.state().preferred == 0
            assert torch.equal(slab.host, expected)
            del slab
    layer.close()
