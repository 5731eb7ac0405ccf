"""The resident store: entries of disk stores, loaded into memory for the duration of a run.

    visits = visits_of(wanted_latents(index, encoder_id, folders))
    with load_resident([disk], visits, name="latents", role="latent_cache", kind="memory", resources=...) as store:
        for line in store.report.lines(): ...
        entry = store.look_up(key) or store.read(key)   # `read` if the entry stayed on disk

`look_up` returns views of the slab. Treat them as read-only: all ranks of a machine may share it. `BatchSource` is
their only reader, and it copies.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING

from gracetune.cache.errors import CacheError, MissingEntryError
from gracetune.cache.keys import Key
from gracetune.cache.loading import (
    CacheLoadReport,
    Contents,
    EntrySelection,
    SmallTensors,
    Views,
    choose_small,
    load_into,
    pack_index,
    select,
    unpack_index,
)
from gracetune.cache.residence import CacheResources, CacheRole, CacheType, Residence, Visits, choose_residence
from gracetune.cache.stats import StoreCounter, StoreStats
from gracetune.cache.store import DiskStore
from gracetune.errors import Problem
from gracetune.hardware.allocation import host_reserve
from gracetune.hostmem.errors import HostMemoryError, StagingError
from gracetune.hostmem.numa import choose_nodes
from gracetune.hostmem.sensors import HostSensor
from gracetune.hostmem.sharing import LocalRanks, Offer, fetch
from gracetune.hostmem.slab import MemorySlab, Slab
from gracetune.memory.errors import UnifiedMemoryError
from gracetune.memory.managed import ManagedSlab
from gracetune.memory.placement import TEXT_ON_DEVICE_SHARE
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from gracetune.cache.encoder import Entry

MOST_KEPT_VIEWS = 1 << 14
"""Entries whose views are kept, about 1 KB each."""


class ResidentStore:
    """A cache in memory, backed by its disk stores. Created by `load_resident`. Thread-safe."""

    def __init__(
        self,
        stores: Sequence[DiskStore],
        slab: Slab | None,
        contents: Contents | None,
        report: CacheLoadReport,
        *,
        pin: bool,
        offer: Offer | None = None,
        small: tuple[ManagedSlab, SmallTensors] | None = None,
    ) -> None:
        """`small`: the small tensors of this cache that are placed on the GPU."""
        self.report = report
        self._stores, self._slab, self._contents = tuple(stores), slab, contents
        self._small = None if small is None else small[0]
        small_view = None if small is None else (small[0].view, small[1])
        self._views = Views(slab.view, contents, small_view) if slab is not None and contents is not None else None
        self._memo: dict[Key, tuple[Mapping[str, Tensor], int]] = {}
        """Views and size of entries used so far; the next epoch uses them again."""
        self._pin = pin
        self._offer = offer
        self._counter = StoreCounter()

    @property
    def stats(self) -> StoreStats:
        return self._counter.snapshot()

    def __contains__(self, key: Key) -> bool:
        """Whether the entry is in memory."""
        return self._contents is not None and self._contents.find(key) is not None

    def look_up(self, key: Key) -> Mapping[str, Tensor] | None:
        """Views of an entry, or None if it is not in memory."""
        found = self._memo.get(key)
        if found is None:
            found = None if self._views is None else self._views.find(key)
            if found is None:
                return None
            if len(self._memo) >= MOST_KEPT_VIEWS:
                self._memo.clear()
            self._memo[key] = found
        self._counter.count_hit(found[1])
        return found[0]

    @property
    def managed(self) -> ManagedSlab | None:
        """The slab if it is managed memory, which can move between host and GPU; else None."""
        return self._slab if isinstance(self._slab, ManagedSlab) else None

    def read(self, key: Key) -> Entry:
        """Read an entry from disk, even if it is in memory. The result is page-locked if the run has a GPU."""
        began = time.perf_counter()
        entry = self._from_disk(key)
        if self._pin:
            entry = {name: tensor.pin_memory() for name, tensor in entry.items()}
        self._counter.count_disk_read(sum(tensor.nbytes for tensor in entry.values()), time.perf_counter() - began)
        return entry

    def _from_disk(self, key: Key) -> Entry:
        for store in self._stores[:-1]:
            with suppress(MissingEntryError):
                return store.read(key)
        return self._stores[-1].read(key)

    def close(self) -> None:
        """Release the slab; its memory is freed with the last view. The disk stores belong to the caller."""
        if self._offer is not None:
            self._offer.close()
            self._offer = None
        self._contents = self._views = None
        self._memo.clear()
        for slab in (self._slab, self._small):
            if slab is not None:
                slab.close()
        self._slab = self._small = None

    def __enter__(self) -> ResidentStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load_resident(
    stores: Sequence[DiskStore],
    visits: Mapping[Key, Visits],
    *,
    name: str,
    role: CacheRole,
    kind: CacheType,
    resources: CacheResources,
    budget: int | None = None,
    threads: int | None = None,
    residence: Residence | None = None,
) -> ResidentStore:
    """Load the most frequently read entries into memory, as many as `budget` (bytes) and the machine allow.

    With several local ranks, rank 0 loads and the others map its pages. All ranks must call this function with the same
    `name`, and `name` must be unique among the loads of a run.
    `residence` overrides the choice by role and machine; benchmarks use it.
    """
    if not stores:
        raise ValueError("a resident store without a disk store")
    job = _Job(tuple(stores), visits, name, role, kind, resources, budget, threads, residence)
    ranks = resources.ranks
    if kind == "disk" or ranks is None or ranks.count == 1:
        return job.load()
    if ranks.rank > 0:
        return _join(job, ranks)
    offer = Offer(ranks, _offer_name(name))  # first, because the other ranks wait for an answer even if loading fails
    with offer.rejecting_on_error():
        store = job.load()
    _publish(store, offer)
    return store


@dataclass(frozen=True, eq=False)
class _Job:
    """The arguments of one `load_resident` call."""

    stores: tuple[DiskStore, ...]
    visits: Mapping[Key, Visits]
    name: str
    role: CacheRole
    kind: CacheType
    resources: CacheResources
    budget: int | None
    threads: int | None
    residence: Residence | None

    def load(self) -> ResidentStore:
        began = time.perf_counter()
        pin = self.resources.device is not None
        limit, why = (0, "as configured") if self.kind == "disk" else _limit(self.resources, self.budget)
        selection = select(self.stores, self.visits, limit)
        residence = self.residence or self._choose(selection.size)
        if residence.kind == "disk":
            return ResidentStore(self.stores, None, None, _report(self.name, residence, selection, why), pin=pin)
        slab, residence = _slab(residence, selection.size, self.resources)
        small = None
        try:
            contents, damaged = load_into(slab.host, selection, self.threads)
            slab.settle()
            if residence.kind == "managed_host":
                small = _small_on_gpu(slab, contents, self.resources)
        except BaseException:
            slab.close()
            raise
        notes = slab.notes if not isinstance(small, str) else (*slab.notes, small)
        small = None if isinstance(small, str) else small
        residence = replace(residence, notes=(*residence.notes, *notes))
        report = replace(
            _report(self.name, residence, selection, why),
            entries=len(contents.table),
            damaged=damaged,
            seconds=time.perf_counter() - began,
            on_gpu=() if small is None else small[1].names,
            on_gpu_size=0 if small is None else small[1].size,
        )
        return ResidentStore(self.stores, slab, contents, report, pin=pin, small=small)

    def _choose(self, size: int) -> Residence:
        resources = self.resources
        return choose_residence(
            self.kind,
            self.role,
            resources.profile,
            size=size,
            device_bytes=resources.device_bytes,
            local_ranks=resources.local_ranks,
            no_managed=resources.no_heap if resources.heap is None else None,
            hints=resources.hints,
            transport=resources.transport,
        )


def _report(name: str, residence: Residence, selection: EntrySelection, why: str) -> CacheLoadReport:
    return CacheLoadReport(
        name,
        residence,
        size=selection.size,
        on_disk=len(selection.left),
        on_disk_size=selection.left_size,
        why_on_disk=why if selection.left else "",
        missing=len(selection.missing),
    )


def _limit(resources: CacheResources, budget: int | None) -> tuple[int | None, str]:
    """The number of bytes the cache may use, and what limits it. If the headroom is unknown, the budget decides."""
    headroom = HostSensor(nodes=resources.machine.host.numa_nodes).read().headroom
    free = None if headroom is None else max(0, headroom - host_reserve(resources.machine))
    if free is not None and (budget is None or free < budget):
        return free, f"{format_bytes(free)} of main memory are available"
    return budget, "" if budget is None else f"the plan allows {format_bytes(budget)} for this cache"


def _slab(residence: Residence, size: int, resources: CacheResources) -> tuple[Slab, Residence]:
    """Allocate the slab. It is page-locked if managed memory cannot be allocated; the returned residence has a note."""
    if residence.is_managed and resources.heap is not None:
        try:
            return ManagedSlab(
                resources.heap, size, "host" if residence.kind == "managed_host" else "device"
            ), residence
        except UnifiedMemoryError as error:
            note = f"cache type unified_memory is not available: {str(error).splitlines()[0]}"
            residence = residence.instead("pinned_host", "page-locked main memory", note)
    nodes = choose_nodes(resources.machine)
    try:
        if resources.local_ranks > 1 or nodes.nodes:
            return MemorySlab.shared(size, nodes, resources.device, in_place=resources.reads_in_place), residence
        return MemorySlab.own(size, resources.device, in_place=resources.reads_in_place), residence
    except HostMemoryError as error:
        hint = "set cache.vae_cache_type and text_cache_type to disk"
        raise CacheError(replace(error.problem, key="cache in memory", hint=hint)) from error


def _small_on_gpu(
    slab: Slab, contents: Contents, resources: CacheResources
) -> tuple[ManagedSlab, SmallTensors] | str | None:
    """Place the small tensors of a host cache on the GPU.

    Returns None if there are none, or a note if their memory cannot be allocated.
    """
    device_bytes = resources.device_bytes
    if resources.heap is None or device_bytes is None:
        return None
    chosen = choose_small(contents, int(device_bytes * TEXT_ON_DEVICE_SHARE))
    if chosen is None:
        return None
    try:
        target = ManagedSlab(resources.heap, chosen.size, "device")
    except UnifiedMemoryError as error:
        return f"{', '.join(chosen.names)} stay in host memory: {str(error).splitlines()[0]}"
    chosen.fill(target.host, slab.host, contents)
    target.settle()
    return target, chosen


# -- one copy for all local ranks -------------------------------------------------------------------------------------


def _offer_name(name: str) -> str:
    return f"cache: {name}"  # staged datasets use the same namespace, and no dataset id has this form


def _publish(store: ResidentStore, offer: Offer) -> None:
    """Rank 0 passes two memory files to the other ranks: the slab, and an index of its entries."""
    slab, contents = store._slab, store._contents
    assert isinstance(slab, MemorySlab), "shared caches are memory files"
    assert slab.file is not None
    assert contents is not None
    store._offer = offer
    try:
        with io.FileIO(os.memfd_create("gracetune-cache-index", os.MFD_CLOEXEC), "r+") as index:
            _write(index, pack_index(contents, store.report))
            files = (slab.file, index)
            offer.publish({"cache": store.report.name}, [file.fileno() for file in files])
    except BaseException:
        store.close()
        raise


def _write(file: io.FileIO, raw: bytes) -> None:
    view = memoryview(raw)
    while view:  # write() may write a part only
        view = view[file.write(view) or 0 :]


def _join(job: _Job, ranks: LocalRanks) -> ResidentStore:
    try:
        _, files = fetch(ranks, _offer_name(job.name))
    except StagingError as error:
        hint = "see the messages of local rank 0"
        raise CacheError(Problem(f"{job.name} of rank 0", str(error), "its cache in memory", hint)) from error
    data, index = files
    with index:
        raw = os.pread(index.fileno(), os.fstat(index.fileno()).st_size, 0)
    try:
        slab = MemorySlab.join(data, job.resources.device, in_place=job.resources.reads_in_place)
    except HostMemoryError as error:
        raise CacheError(replace(error.problem, key="cache in memory")) from error
    slab.settle()
    contents, report = unpack_index(raw)
    residence = replace(report.residence, notes=(*report.residence.notes, *slab.notes))
    report = replace(report, residence=residence)
    return ResidentStore(job.stores, slab, contents, report, pin=job.resources.device is not None)
