"""Where caches and batches of a run are on machines we model: a fake driver whose memory is real, real stores, real
batches. Only the GPU's own view of the memory is missing: the CPU's stands for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.cache.batches import BATCHES_PER_CHECK, Batch, BatchSource
from gracetune.cache.residence import CacheResources, CacheRole, CacheType
from gracetune.cache.resident import ResidentStore, load_resident
from gracetune.cache.store import DiskStore
from gracetune.config.run_config import RunConfig
from gracetune.data.index import DataIndex
from gracetune.data.loader import Exhausted, Loader
from gracetune.hardware import Machine
from gracetune.hardware.recording import load_recording
from gracetune.hostmem.slab import MemorySlab
from gracetune.memory.errors import CacheWrittenError, DriverError
from gracetune.memory.lookahead import LookAhead, LookAheadStats
from gracetune.memory.managed import ManagedBuffer, ManagedHeap, ManagedSlab
from gracetune.memory.native import HOST
from gracetune.memory.placement import FOLLOW_CACHES, Hints, StepWaits, hints_of, rehome
from gracetune.memory.transport import (
    FILE,
    LinkSpeeds,
    ManagedSpeeds,
    MeasuredTransport,
    TransportPath,
    choose_transport,
    machine_key,
    mover_for,
    recall,
    remember,
)
from gracetune.train.assembly import transport_of
from gracetune.train.view import CollectingView
from gracetune.units import GIB, MIB
from runs.made_runs import TinyModel, config_for, run
from runs.test_resume import losses
from unit.cache.sample_caches import (
    CPU,
    KEYS,
    LATENT,
    TEXT,
    fill,
    latent_visits,
    resident,
    source_of,
    text_visits,
    this_machine,
)
from unit.cache.test_batches import assert_right
from unit.data.folders import made_up
from unit.memory.test_lookahead import Clocked

MACHINES = Path(__file__).parents[2] / "fixtures" / "machines"
REQUESTED = Hints(True, "memory.enable_uvm_hints is true", requested=True)
REJECTED = Hints(False, "memory.enable_uvm_hints is false")
PINNED = TransportPath(55, 0.98)
COHERENT = LinkSpeeds(PINNED, 55.0, ManagedSpeeds(TransportPath(54, 0.97), TransportPath(49, 0.4), 15.0))
OVER_PCIE = LinkSpeeds(PINNED, 55.0, ManagedSpeeds(TransportPath(51, 0.10), TransportPath(49, 0.4), 15.0))


def machine(name: str) -> Machine:
    """A modelled machine's GPU with this machine's main memory, because caches really allocate here."""
    return load_recording(MACHINES / name).model_copy(update={"host": this_machine().host})


@pytest.fixture(scope="module")
def index() -> DataIndex:
    return made_up({"counts": [6, 4], "cache_latents": "disk", "captions": {"dropout": 0.3}})


@pytest.fixture(scope="module")
def disk(index: DataIndex, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskStore]:
    with fill(tmp_path_factory.mktemp("placement") / "cache", index) as store:
        yield store


@pytest.fixture
def heap(bench: Any, monkeypatch: pytest.MonkeyPatch) -> ManagedHeap:
    """Managed memory of the fake driver, and simulated page-locking."""

    def settle(slab: ManagedSlab) -> None:
        if slab.home == "device":
            slab._buffer.prefetch("device", 7)

    def register(slab: MemorySlab, device: int) -> None:
        slab._is_locked = True

    monkeypatch.setattr(ManagedBuffer, "cuda", ManagedBuffer.cpu)
    monkeypatch.setattr(ManagedSlab, "settle", settle)
    monkeypatch.setattr(MemorySlab, "_register", register)
    monkeypatch.setattr(MemorySlab, "_unregister", lambda slab: None)
    monkeypatch.setattr("gracetune.hostmem.slab.view_for_gpu", lambda host, device: host)
    return ManagedHeap(bench.uvm, 0, lambda: None)


def stores(
    disk: DiskStore, index: DataIndex, resources: CacheResources, kind: CacheType = "unified_memory"
) -> tuple[ResidentStore, ResidentStore]:
    def load(name: str, role: CacheRole) -> ResidentStore:
        visits = latent_visits(index, LATENT) if role == "latent_cache" else text_visits(index, TEXT)
        return load_resident([disk], visits, name=name, role=role, kind=kind, resources=resources)

    return load("latents-0", "latent_cache"), load("texts-0", "text_cache")


def batches(source: BatchSource) -> list[Mapping[str, torch.Tensor]]:
    found = []
    with source:
        while not isinstance(outcome := source.next(), Exhausted):
            if isinstance(outcome, Batch):
                assert_right(outcome)
                found.append({name: one.clone() for name, one in outcome.tensors.items()})
    return found


def read(
    index: DataIndex, two: tuple[ResidentStore, ResidentStore], resources: CacheResources, size: int = 2, **more: Any
) -> Any:
    assert resources.transport is not None
    return BatchSource(
        Loader(index, batch_size=size, epochs=1), latents=two[0], texts=two[1], keys=KEYS, device=CPU,
        mover=mover_for(resources.transport, CPU), **more,
    )  # fmt: skip


def test_on_a_superchip_hints_are_on_the_caches_and_the_driver_knows_them(
    bench: Any, heap: ManagedHeap, index: DataIndex, disk: DiskStore
) -> None:
    resources = CacheResources(machine("gh200-numa"), 0, heap, transport=choose_transport("superchip", COHERENT))
    latents, texts = two = stores(disk, index, resources)
    assert (latents.report.residence.kind, texts.report.residence.kind) == ("managed_host", "managed_device")
    assert latents.managed is not None
    assert texts.managed is not None
    assert latents.managed._buffer.state().preferred == HOST
    assert texts.managed._buffer.state().preferred == 0
    assert latents.managed._buffer.state().accessed_by == (0,)
    assert latents._small is not None, latents.report.lines()
    assert latents._small._buffer.state().preferred == 0, "masks are at home on the GPU"
    assert latents.report.on_gpu == ("loss_mask",)
    assert "loss_mask" in latents.report.lines()[1]
    prefetched = bench.fake.journal("cuMemPrefetchAsync")
    assert len(prefetched) == 2, "the text cache and the masks, once each"
    assert heap.hints.bytes >= latents.report.size + texts.report.size
    expected = batches(source_of(Loader(index, batch_size=2, epochs=1), resident(disk, index)))
    found = batches(read(index, two, resources))
    assert len(found) == len(expected) > 3
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    for store in two:
        store.close()
    assert heap.held_bytes == 0
    assert bench.fake.in_use == 0


@pytest.mark.parametrize("name", ["gh200-numa", "gh200-cdmm", "x86-h200", "gb10"])
def test_false_means_no_managed_memory_anywhere(
    name: str, bench: Any, heap: ManagedHeap, index: DataIndex, disk: DiskStore
) -> None:
    found = machine(name)
    resources = CacheResources(
        found, 0, None, REJECTED.reason, hints=REJECTED, transport=choose_transport(found.profile.value, None)
    )
    two = stores(disk, index, resources)
    for store in two:
        assert store.managed is None
        assert store.report.residence.kind in ("pinned_host", "shared_host")
        assert any("memory.enable_uvm_hints is false" in line for line in store.report.lines()), store.report.lines()
    assert len(batches(read(index, two, resources))) > 3
    for store in two:
        store.close()
    assert bench.uvm.total_stats().allocations == 0
    assert not bench.fake.journal("cuMemAdvise")


def test_hints_the_driver_rejects_are_counted_and_said(
    bench: Any, heap: ManagedHeap, index: DataIndex, disk: DiskStore
) -> None:
    bench.fake.fail("cuMemAdvise_v2", 801, every=1)
    two = stores(disk, index, CacheResources(machine("gh200-numa"), 0, heap, hints=REQUESTED))
    for store in two:
        assert store.report.residence.kind == "pinned_host"
        assert "cache type unified_memory is not available: cuMemAdvise_v2 failed" in store.report.lines()[1]
        store.close()
    assert (heap.hints.bytes, heap.hints.refused) == (0, 2)
    assert bench.fake.in_use == 0


@pytest.mark.parametrize(
    ("name", "hints", "speeds", "place", "stated"),
    [
        (
            "x86-h200",
            FOLLOW_CACHES,
            OVER_PCIE,
            "pinned_host",
            "set memory.enable_uvm_hints: true to use managed memory",
        ),
        ("x86-h200", REQUESTED, OVER_PCIE, "managed_host", "memory.enable_uvm_hints is true"),
        ("gh200-numa", FOLLOW_CACHES, COHERENT, "managed_host", "gathered over the link"),
        ("gh200-numa", FOLLOW_CACHES, OVER_PCIE, "pinned_host", "51 GB/s, 10% hidden, against 55 GB/s, 98% hidden"),
        ("gh200-numa", REQUESTED, OVER_PCIE, "managed_host", "memory.enable_uvm_hints is true"),
        ("gb10", REQUESTED, None, "shared_host", "one pool: read in place"),
    ],
)
def test_the_switch_and_the_measurement_decide_where_a_cache_is(
    name: str,
    hints: Hints,
    speeds: LinkSpeeds | None,
    place: str,
    stated: str,
    heap: ManagedHeap,
    index: DataIndex,
    disk: DiskStore,
) -> None:
    found = machine(name)
    resources = CacheResources(found, 0, heap, hints=hints, transport=choose_transport(found.profile.value, speeds))
    two = stores(disk, index, resources)
    assert two[0].report.residence.kind == place
    assert stated in "\n".join(two[0].report.lines())
    for store in two:
        store.close()


def test_on_one_pool_nothing_is_copied(heap: ManagedHeap, index: DataIndex, disk: DiskStore) -> None:
    found = machine("gb10")
    resources = CacheResources(found, 0, transport=choose_transport(found.profile.value, None))
    two = stores(disk, index, resources, kind="memory")
    inside = [range(one._slab.view.data_ptr(), one._slab.view.data_ptr() + len(one._slab.view)) for one in two]  # type: ignore[union-attr]
    seen = 0
    with read(index, two, resources, size=1) as source:
        while not isinstance(outcome := source.next(), Exhausted):
            if isinstance(outcome, Batch):
                seen += 1
                assert_right(outcome)
                assert outcome.tensors["latents"].data_ptr() in inside[0], "read where it lies"
                assert outcome.tensors["prompt_embeds"].data_ptr() in inside[1]
    assert seen > 3
    with read(index, two, resources, size=1) as source:
        batch = source.next()
        assert isinstance(batch, Batch)
        batch.tensors["latents"].add_(1)
        with pytest.raises(CacheWrittenError, match="wrote into latents"):
            source.next()
    assert len(batches(read(index, stores(disk, index, resources), resources, size=3))) > 1, "several are put together"
    for store in two:
        store.close()


# -- re-choosing ------------------------------------------------------------------------------------------------------


@dataclass
class Waiting:
    """A mover whose batches arrive with a given delay on the GPU's clock."""

    waited_ms: float = 0.0
    bytes: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def start(self, batch: Mapping[str, Any], *, ahead: bool = True) -> Waiting:
        return Waiting(self.waited_ms, 0, {name: part.build() for name, part in batch.items()})

    def keep(self, slots: int) -> None:
        pass

    def close(self) -> None:
        pass

    def arrive(self) -> tuple[Mapping[str, torch.Tensor], Clocked]:
        return self.tensors, Clocked(self.waited_ms, 100.0)

    def release(self) -> bool:
        return False


@dataclass
class Layer:
    """The part of the memory layer that a batch source uses."""

    room: int | None = 8 * GIB
    memory_is_tight: bool = False

    def look_ahead(self, feed: Any, mover: Any, *, depth: int) -> LookAhead:
        return LookAhead(feed, mover, depth=depth, memory_tight=lambda: self.memory_is_tight, stats=LookAheadStats())

    def device_room(self) -> int | None:
        return self.room

    def moving_stream(self) -> int:
        return 9

    def stats(self) -> dict[str, Any]:
        return {}


def test_a_cache_that_is_waited_for_moves_to_the_gpu_and_back_when_memory_is_tight(
    bench: Any, heap: ManagedHeap, tmp_path: Path
) -> None:
    index = made_up({"counts": [40], "cache_latents": "disk"})
    resources = CacheResources(machine("gh200-numa"), 0, heap, transport=choose_transport("superchip", COHERENT))
    with fill(tmp_path / "cache", index) as disk:
        latents, texts = stores(disk, index, resources)
        slab = latents.managed
        assert slab is not None
        # As large as a cache is: one that shares its page with others cannot be moved.
        slab._buffer.close()
        slab._buffer = heap.empty((4 * MIB,), torch.uint8, "host")
        layer, mover, heard = Layer(), Waiting(), list[str]()
        source = BatchSource(
            Loader(index, batch_size=1, epochs=20), latents=latents, texts=texts, keys=KEYS, device=CPU, mover=mover,
            memory=layer, on_decision=heard.append,  # type: ignore[arg-type]
        )  # fmt: skip
        with source:

            def some(count: int) -> None:
                taken = 0
                while taken < count:
                    taken += isinstance(source.next(), Batch)

            some(3 * BATCHES_PER_CHECK)
            assert not heard, "nothing waits, nothing moves"
            mover.waited_ms, layer.room = 20.0, 1
            some(2 * BATCHES_PER_CHECK)
            assert len(heard) == 1, "said once"
            assert "not fit into free GPU memory" in heard[0]
            layer.room = 8 * GIB
            bench.fake.clear()
            some(BATCHES_PER_CHECK)
            assert slab._buffer.state().preferred == 0
            assert "location=0 stream=9 " in bench.fake.journal("cuMemPrefetchAsync")[0]
            assert heard[1].startswith("latents-0: moves to the GPU: steps of ")
            some(3 * BATCHES_PER_CHECK)
            assert len(heard) == 2, "it is there"
            layer.memory_is_tight = True
            some(1)
            assert slab._buffer.state().preferred == HOST
            assert heard[2] == "latents-0: moves to host memory: memory is tight"
            layer.memory_is_tight = False
            some(4 * BATCHES_PER_CHECK)
            assert len(heard) == 3, "it does not move to and fro"
        latents.close()
        texts.close()


def test_what_moves_a_cache() -> None:
    long, short = StepWaits(20, 100, is_deepest=True), StepWaits(1, 100, is_deepest=True)
    calm: dict[str, Any] = {"size": GIB, "room": 2 * GIB, "memory_tight": False, "was_sent_back": False}
    found = rehome("host", long, **calm)
    assert found is not None
    assert found.home == "device"
    assert "1.00 GiB" in found.reason
    assert rehome("host", short, **calm) is None
    assert rehome("host", replace(long, is_deepest=False), **calm) is None, "a deeper look-ahead comes first"
    for change in ({"room": GIB - 1}, {"room": None}, {"memory_tight": True}, {"was_sent_back": True}):
        assert rehome("host", long, **(calm | change)) is None, change
    assert rehome("device", long, **calm) is None
    back = rehome("device", short, **(calm | {"memory_tight": True}))
    assert back is not None
    assert back.home == "host"


# -- measured once ----------------------------------------------------------------------------------------------------


def test_a_machine_is_measured_once(heap: ManagedHeap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[bool] = []

    def measure(device: int, heap: ManagedHeap | None) -> MeasuredTransport:
        requested.append(heap is not None)
        return MeasuredTransport(COHERENT if heap is not None else replace(COHERENT, managed=None), 0.25)

    monkeypatch.setattr("gracetune.train.assembly.measure_link", measure)
    chip, card = CacheResources(machine("gh200-numa"), 0, heap), CacheResources(machine("x86-h200"), 0, heap)
    first, second = (transport_of(chip, tmp_path, heap) for _ in range(2))
    assert requested == [True]
    assert (first.transport, second.transport) == ("managed_gather", "managed_gather")
    assert first.reason.endswith("measured in 0.25 s")
    assert f"measured before ({tmp_path / FILE})" in second.reason
    plain = transport_of(chip, tmp_path, None)
    assert (plain.transport, requested) == ("pinned_copy", [True]), "what is known already is not measured again"
    assert "no managed memory was requested" in plain.reason
    assert transport_of(card, tmp_path, None).transport == "pinned_copy"
    insisted = transport_of(card, tmp_path, heap, managed_requested=True)
    assert insisted.transport == "managed_gather", "as asked, whatever is faster"
    assert "54 GB/s, 97% hidden; pinned copies reach 55 GB/s, 98% hidden" in insisted.reason
    assert requested == [True, False, True], "another machine, and then its managed memory"
    assert transport_of(CacheResources(machine("gb10"), 0), tmp_path, None).transport == "in_place"
    assert transport_of(CacheResources(machine("gh200-numa"), None), tmp_path, None).transport == "in_place"
    assert requested == [True, False, True], "nothing to measure"


@pytest.mark.parametrize(
    "error",
    [
        DriverError("cuMemAllocManaged", 2, "CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("CUDA error: out of memory\nwhile pinning"),  # what torch says where `ulimit -l` is small
    ],
)
@pytest.mark.parametrize(("managed_requested", "transport"), [(False, "pinned_copy"), (True, "managed_gather")])
def test_a_link_that_cannot_be_measured_says_so(
    error: Exception,
    managed_requested: bool,
    transport: str,
    heap: ManagedHeap,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(device: int, heap: ManagedHeap | None) -> MeasuredTransport:
        raise error

    monkeypatch.setattr("gracetune.train.assembly.measure_link", fail)
    found = transport_of(
        CacheResources(machine("gh200-numa"), 0, heap), tmp_path, heap, managed_requested=managed_requested
    )
    assert found.transport == transport
    assert f"not measured ({str(error).splitlines()[0]})" in found.reason
    assert not list(tmp_path.iterdir())


def test_the_file_of_measured_speeds_is_only_a_memory(tmp_path: Path) -> None:
    found = machine("gh200-numa")
    key = machine_key(found, 0)
    assert "GH200" in key
    assert (
        machine_key(found.model_copy(update={"software": found.software.model_copy(update={"torch": "9"})}), 0) != key
    )
    measured = MeasuredTransport(COHERENT, 0.5)
    assert remember(tmp_path / "new", key, measured) is None
    assert recall(tmp_path / "new", key, with_managed=True) == measured
    assert recall(tmp_path / "new", "another machine", with_managed=False) is None
    for damaged in ("", "{", '{"format": "gracetune-link-speeds", "version": 2, "machines": {}}', "[]"):
        (tmp_path / "new" / FILE).write_text(damaged)
        assert recall(tmp_path / "new", key, with_managed=False) is None
    assert remember(tmp_path / "new", key, replace(measured, speeds=replace(COHERENT, managed=None))) is None
    assert recall(tmp_path / "new", key, with_managed=True) is None, "managed memory was not measured"
    assert recall(tmp_path / "new", key, with_managed=False) is not None
    (tmp_path / "file").write_text("")
    assert "file" in (remember(tmp_path / "file" / "below", key, measured) or "")
    assert [one.name for one in (tmp_path / "new").iterdir()] == [FILE]


# -- whole runs -------------------------------------------------------------------------------------------------------

UNIFIED = {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"}


def test_a_whole_run_with_managed_caches_learns_what_one_without_learns(
    bench: Any, heap: ManagedHeap, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without, hinted = (
        config_for("sdxl", tiny_model, tmp_path / name, cache=UNIFIED, memory=memory, training={"max_steps": 3})
        for name, memory in (("without", {"enable_uvm_hints": False}), ("hinted", {}))
    )
    heard = CollectingView()
    run(without, heard)
    assert "residency hints: off, memory.enable_uvm_hints is false" in heard.lines
    assert "batches: in_place, no GPU: batches are read in place" in heard.lines
    stated = "texts-0: cache type unified_memory is not used: memory.enable_uvm_hints is false"
    assert stated in heard.lines

    def resources(config: RunConfig, *_: Any) -> CacheResources:
        return CacheResources(
            machine("gh200-numa"), 0, heap, hints=hints_of(config), transport=choose_transport("superchip", COHERENT)
        )

    monkeypatch.setattr("gracetune.train.load.cache_resources", resources)
    heard = CollectingView()
    run(hinted, heard)
    assert losses(without) == losses(hinted)
    assert any(line.startswith("latents-0: 4 entries") and "in managed_host" in line for line in heard.lines)
    assert any(line.startswith("texts-0: ") and "in managed_device" in line for line in heard.lines)
    assert any("time_ids" in line and "placed on the GPU" in line for line in heard.lines)
    assert heap.hints.bytes > 0
    gc.collect()  # the last batch, read in place
    assert heap.held_bytes == 0, "everything managed was given back"
