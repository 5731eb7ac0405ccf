"""The caches on a real GPU: the same batches from pinned, managed and device slabs, with and without look-ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gracetune.cache.batches import Batch, BatchSource
from gracetune.cache.residence import CacheResources, CacheRole, Residence
from gracetune.cache.resident import ResidentStore, load_resident
from gracetune.cache.store import DiskStore
from gracetune.data.index import DataIndex
from gracetune.data.loader import Exhausted, Loader
from gracetune.hostmem.slab import MemorySlab
from gracetune.memory.lookahead import InPlace, LookAhead, RingMover
from gracetune.memory.managed import ManagedHeap
from gracetune.memory.placement import MemoryKind
from gracetune.memory.stacked import Constant, Stacked
from gracetune.units import MIB
from unit.cache.sample_caches import (
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
from unit.data.folders import made_up

CUDA = torch.device("cuda", 0)
PLACES: tuple[MemoryKind, ...] = ("pinned_host", "managed_host", "managed_device")


@pytest.fixture(scope="module")
def index() -> DataIndex:
    return made_up(
        {"counts": [9, 5], "cache_latents": "disk", "captions": {"dropout": 0.3}, "repeats": 1},
        {"counts": [4], "cache_latents": "disk", "augmentation": {"flip_x": True}},
    )


@pytest.fixture(scope="module")
def disk(index: DataIndex, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskStore]:
    with fill(tmp_path_factory.mktemp("gpu") / "cache", index) as store:
        yield store


def on_gpu(
    disk: DiskStore, index: DataIndex, heap: ManagedHeap, place: MemoryKind, *, budget: int | None = None
) -> tuple[ResidentStore, ResidentStore]:
    resources = CacheResources(this_machine(), 0, heap)

    def load(role: CacheRole) -> ResidentStore:
        visits = latent_visits(index, LATENT) if role == "latent_cache" else text_visits(index, TEXT)
        return load_resident(
            [disk], visits, name=role, role=role, kind="unified_memory", resources=resources, budget=budget,
            residence=Residence(place, "requested by the test"),
        )  # fmt: skip

    return load("latent_cache"), load("text_cache")


def run(source: BatchSource, sizes: list[int | None]) -> list[Batch]:
    """To the end, as a loop does it: each batch is used on the GPU, then copied away."""
    found, call = [], 0
    with source:
        while not isinstance(outcome := source.next(sizes[call % len(sizes)]), Exhausted):
            call += 1
            if isinstance(outcome, Batch):
                for tensor in outcome.tensors.values():
                    assert tensor.device == source_device(source)
                found.append(
                    replace(outcome, tensors={name: one.cpu().clone() for name, one in outcome.tensors.items()})
                )
                for tensor in outcome.tensors.values():
                    tensor.zero_()  # a step may write into its batch; the cache must not notice
    return found


def source_device(source: BatchSource) -> torch.device:
    return CUDA if source._on_gpu else torch.device("cpu")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("budget", [None, 1000])  # of latents one entry fits, of texts about half
def test_batches_are_those_of_the_cpu(
    index: DataIndex, disk: DiskStore, heap: ManagedHeap, place: MemoryKind, depth: int, budget: int | None
) -> None:
    sizes: list[int | None] = [2, 2, 3, None]
    expected = run(source_of(Loader(index, batch_size=2, epochs=2), resident(disk, index), depth=0), sizes)
    stores = on_gpu(disk, index, heap, place, budget=budget)
    assert stores[0].report.residence.kind == place, stores[0].report.lines()
    assert not stores[0].report.residence.notes
    source = BatchSource(
        Loader(index, batch_size=2, epochs=2), latents=stores[0], texts=stores[1], keys=KEYS, device=CUDA, depth=depth
    )
    found = run(source, sizes)
    assert all((store.stats.disk_reads > 0) == (budget is not None) for store in stores)
    assert all(store.stats.hits > 0 for store in stores) or budget is not None
    for store in stores:
        store.close()
    assert [one.ref for one in found] == [one.ref for one in expected]
    for one, two in zip(found, expected, strict=True):
        assert one.tensors.keys() == two.tensors.keys()
        for name in one.tensors:
            assert torch.equal(one.tensors[name], two.tensors[name]), name


def test_pinned_slabs_are_page_locked_and_let_go_of() -> None:
    slab = MemorySlab.own(8 * MIB, 0)
    assert not slab.host[:64].is_pinned(), "the driver would fill it with zeros first, by one thread"
    slab.settle()
    assert not slab.notes
    assert slab.host[:64].is_pinned()
    tensor = slab.host[:1024]
    slab.close()
    assert not tensor.is_pinned()
    assert int(tensor.sum()) == 0, "the memory itself lives as long as a view of it"


def test_memory_that_cannot_be_page_locked_is_said_and_harms_nothing() -> None:
    first = MemorySlab.own(4 * MIB, 0)
    first.settle()
    with torch.cuda.device(0):  # registering what is registered fails, in earnest
        first._register(0)
    assert "page-lock" in first.notes[0]
    assert float(torch.ones(3, device=CUDA).sum()) == 3, "the error is not left for the next kernel"
    first.close()


def test_pieces_that_only_our_own_copies_read_stay_until_they_were_read() -> None:
    """torch would hand their pinned memory to the next entry that is read from disk."""
    mover = RingMover(CUDA)
    assert mover.copy_bytes is not None, "the native library is built for these tests"
    busy = torch.randn(4096, 4096, device=CUDA)

    def parts() -> Iterator[dict[str, Stacked]]:
        for number in range(40):
            chunks = tuple(torch.full((1 << 18,), float(number)).pin_memory() for _ in range(4))
            yield {"x": Stacked((4, 1 << 18), torch.float32, chunks)}
            mover.stream.wait_stream(torch.cuda.current_stream(CUDA))
            with torch.cuda.stream(mover.stream):
                torch.mm(busy, busy)  # the copies come later than the host thinks

    found = [batch["x"].mean(dim=1) for batch in LookAhead(parts(), mover, depth=3)]
    assert [one.tolist() for one in found] == [[float(number)] * 4 for number in range(40)]


@pytest.mark.parametrize("kind", [RingMover, InPlace])
def test_pieces_with_filling(kind: type[RingMover] | type[InPlace]) -> None:
    mover = kind(CUDA)
    chunks = (torch.full((3, 4), 2.0).pin_memory(), torch.full((1, 4), 3.0).pin_memory(), Constant((2, 4), 5.0))
    parts = [{"x": Stacked((3, 3, 4), torch.float32, chunks)}] * 6
    for batch in LookAhead(parts, mover, depth=2):
        rows = batch["x"][..., 0].cpu().tolist()
        assert rows == [[2, 2, 2], [3, 0, 0], [5, 5, 0]]
        batch["x"].fill_(9.0)  # what the next batch in this slot must not see


def test_managed_slabs_that_are_rejected_fall_back_and_say_so(
    index: DataIndex, disk: DiskStore, heap: ManagedHeap
) -> None:
    heap.uvm.set_managed_cap(1)
    try:
        latents, texts = on_gpu(disk, index, heap, "managed_host")
    finally:
        heap.uvm.set_managed_cap(4 << 30)
    assert latents.report.residence.kind == "pinned_host"
    assert "cache type unified_memory is not available" in "\n".join(latents.report.lines())
    latents.close()
    texts.close()


@pytest.mark.usefixtures("uvm")  # builds the native part where that is missing
def test_the_step_hardly_waits(tmp_path: Path) -> None:
    from gracetune.bench import cache as bench
    from gracetune.bench.cache_gpu import waiting_rows

    index = bench.index_of(256)
    with bench.open_filled_store(tmp_path / "cache", index) as disk:
        rows = {row.name: row for row in waiting_rows(disk, index, this_machine())}
    for name in ("wait_pinned", "wait_managed"):
        assert rows[name].ok, rows[name]
    assert rows["wait_pinned_no_look_ahead"].value > rows["wait_pinned"].value, "off is off"
    assert rows["loss_pinned"].value < 3, rows["loss_pinned"]  # the bench has the bar
