"""From folders to batches on the device: stage files, index samples, fill caches, open the source of batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gracetune.cache.audit import why_missing
from gracetune.cache.batches import BatchSource, EntrySource, LiveEncoder, SampleKeys
from gracetune.cache.created_entries import CreatedEntries, Made
from gracetune.cache.encode_passes import PassOptions, Share
from gracetune.cache.errors import EntriesError, MissingEntryError
from gracetune.cache.folders import cache_folders
from gracetune.cache.keys import Key
from gracetune.cache.required_entries import LatentItem, TextItem, visits_of
from gracetune.cache.residence import CacheResources, CacheRole, CacheType, Visits
from gracetune.cache.resident import ResidentStore, load_resident
from gracetune.cache.session import Caches, EntryRepair, FilledCaches, Needs, build, missing_among, needs
from gracetune.cache.stats import StoreStats
from gracetune.cache.store import DiskStore
from gracetune.config.dataset_config import Dataset
from gracetune.config.run_config import RunConfig
from gracetune.data.backends.in_memory import InMemoryBackend
from gracetune.data.backends.pool import BackendPool, sharing_notes
from gracetune.data.copies.local import Copies
from gracetune.data.geometry import Geometry
from gracetune.data.index import DamagedFiles, DataIndex, by_dataset, freshness, left_out_lines
from gracetune.data.index_builder import build_index, scan_folder
from gracetune.data.loader import Loader
from gracetune.data.text_format import counted
from gracetune.hardware import Machine
from gracetune.hostmem.sharing import LocalRanks
from gracetune.memory.transport import mover_for
from gracetune.memory.unified_memory import UnifiedMemory
from gracetune.models.encoders import FamilyEncoders
from gracetune.train.runtime import Runtime
from gracetune.train.view import View

if TYPE_CHECKING:
    from torch import Tensor

    from gracetune.cache.encoder import Entry


def local_ranks(config: RunConfig, runtime: Runtime) -> LocalRanks | None:
    """The ranks on this machine, which share host memory; None for a single process."""
    if runtime.local_world_size == 1:
        return None
    return LocalRanks(runtime.local_rank, runtime.local_world_size, f"{config.output_dir}\0{runtime.key}")


def fetch(copies: Copies, runtime: Runtime, view: View) -> RunConfig:
    """Copy remote datasets to this machine, and return the config with folders in place of URLs.

    Rank 0 downloads first. The other ranks then find the files, or download them on other machines.
    """
    if any(True for _ in copies.wanted()):
        with view.phase("copies of remote data"):
            if not runtime.is_main:  # wait for rank 0
                runtime.barrier()
            copies.make(report=view.report, warn=view.warn, on_fetched=view.on_download, announced=True)
            if runtime.is_main:
                runtime.barrier()
    return copies.localized()


def stage_data(
    config: RunConfig, geometry: Geometry, machine: Machine, runtime: Runtime, view: View, stack: ExitStack
) -> DataIndex:
    """Index all datasets, and stage those of type `in_memory` in host memory. The backends are closed with `stack`."""
    pool = stack.enter_context(
        BackendPool(
            config.datasets,
            machine=machine,
            ranks=local_ranks(config, runtime),
            watch=lambda dataset: view.on_staging(dataset.id),
        )
    )
    for note in sharing_notes(pool.folders):
        view.report(note)
    with view.phase("looking at the data"):
        # Rank 0 writes its scan to disk. The other ranks read it, so that not every rank hashes every file.
        if not runtime.is_main:
            runtime.barrier()
        index = build_index(
            config, geometry, open_backend=pool.open, scans=scan_folder(config), on_scanned=view.on_scanned,
            saves_scans=runtime.local_rank == 0,
        )  # fmt: skip
        if runtime.is_main:
            runtime.barrier()
    for backend in pool.opened:
        if isinstance(backend, InMemoryBackend) and backend.report is not None:
            for line in backend.report.lines():
                view.report(line)
    for note in _about(index):
        view.warn(note)
    return index


def _about(index: DataIndex) -> Iterator[str]:
    """Notes about dropped files and about datasets that are used in an unexpected way."""
    yield from index.notes
    for found in (*index.datasets, *index.held_out):
        for reason, count in Counter(one.reason for one in found.dropped).items():
            yield f"dataset {found.id}: {counted(count, 'file')} dropped, {reason}; `gracetune data show` names them"
        yield from (f"dataset {found.id}: {note}" for note in found.notes)


@dataclass(frozen=True, eq=False)
class CachedSamples:
    """Samples and the stores with their cache entries: everything a batch is made of."""

    index: DataIndex
    """All samples, without damaged files."""
    keys: SampleKeys
    latents: EntrySource
    texts: EntrySource


@dataclass(frozen=True, eq=False)
class CachedData(CachedSamples):
    """The filled caches of a run."""

    caches: Caches
    built: FilledCaches
    report: tuple[str, ...]
    """Lines that say where each cache is, and why."""
    made: CreatedEntries | None = None
    """The record of created entries, which are removed when the run ends; None if the cache is persistent."""
    inherited: Made = field(default_factory=dict)
    """On rank 0: entries that earlier processes of this run created."""


def fill_caches(
    config: RunConfig, index: DataIndex, encoders: FamilyEncoders, runtime: Runtime, resources: CacheResources,
    view: View,
    stack: ExitStack, *, epoch: int = 0,
) -> CachedData:  # fmt: skip
    """Encode missing entries, with the work shared by all ranks, and load the caches that belong in memory."""
    made, inherited = _record(config, runtime)
    caches = stack.enter_context(
        Caches(cache_folders(config), writable=True, before_writing=None if made is None else made.note)
    )
    options = PassOptions(share=Share(runtime.rank, runtime.world_size))

    def explain(missing: Sequence[LatentItem] | Sequence[TextItem]) -> None:
        if runtime.is_main:
            for line in why_missing(caches.store, missing):
                view.report(line)
        runtime.barrier()  # the others wait: entries they encode would no longer be missing

    with view.phase("caches"):
        built = build(
            config, index, encoders, caches, epoch=epoch, options=options, on_text=view.on_text,
            on_latents=view.on_latents,
            on_missing=explain,
        )  # fmt: skip
        runtime.barrier()
    for note in built.notes_of(runtime.all_of({**built.texts.truncated} or None)):
        view.warn(note)
    elsewhere = damaged_on_other_ranks(built, runtime)
    if elsewhere:
        index = built.index.without(by_dataset(elsewhere))
        wanted = needs(config, index, encoders, caches.folders, epoch=epoch)
        built = replace(built, index=index, wanted=wanted)
        for line in left_out_lines(elsewhere):
            view.warn(line)
    per_use = encoders.spec.per_use(config.model)
    keys = SampleKeys(built.latents.encoder, built.texts.encoder, encoders.reads_images(), per_use)
    latents, texts, report = load_caches(config, built.wanted, caches, resources, stack, name=str(epoch))
    lost = [key for store in (latents, texts) if isinstance(store, ResidentStore) for key in store.report.damaged]
    if runtime.highest(len(lost)):
        # Entries that were damaged on disk are encoded again now, while there is memory for the encoders. They are not
        # in the resident store, so they will be read from disk.
        with view.phase("caches, again"):
            build(
                config,
                built.index,
                encoders,
                caches,
                epoch=epoch,
                wanted=built.wanted,
                options=options,
                on_missing=explain,
            )
            runtime.barrier()
    # These lists hold an object for every entry and are no longer needed. The run keeps only its index.
    built = replace(built, wanted=replace(built.wanted, texts=[], latents=[]))
    return CachedData(built.index, keys, latents, texts, caches, built, report, made, inherited)


def missing_latents(config: RunConfig, index: DataIndex, encoders: FamilyEncoders, *, epoch: int) -> list[LatentItem]:
    """Samples whose latents are not cached."""
    folders = cache_folders(config)
    with Caches(folders, writable=False) as caches:
        return missing_among(caches, needs(config, index, encoders, folders, epoch=epoch).latents)


def _record(config: RunConfig, runtime: Runtime) -> tuple[CreatedEntries | None, Made]:
    """Open the record of created entries, and take over that of earlier processes.

    This runs before any rank encodes: `fill_caches` has a barrier after it.
    """
    made = CreatedEntries(Path(config.output_dir).expanduser(), runtime.rank)
    if not config.cache.persistent_cache:
        return made, made.take_over() if runtime.is_main else {}
    if runtime.is_main:
        made.forget()
    return None, {}


def repair_of(
    config: RunConfig, cached: CachedData, loader: Loader, encoders: FamilyEncoders, runtime: Runtime, view: View
) -> Callable[[EntriesError], None]:
    """A function that encodes damaged entries of a batch again. Each rank repairs its own; the others wait for it."""
    on_host = None
    if encoders.placement.device.type != "cpu":
        on_host = replace(encoders, placement=replace(encoders.placement, device=torch.device("cpu")))
    share = Share(runtime.rank, runtime.world_size)
    repair = EntryRepair(config, cached.caches, encoders, on_host, share, view.warn)
    return lambda error: repair(error, loader.index, loader.epoch)


def damaged_on_this_rank(built: FilledCaches) -> DamagedFiles:
    return {(one.dataset, one.path): one.reason for one in (*built.texts.damaged, *built.latents.damaged)}


def damaged_on_other_ranks(built: FilledCaches, runtime: Runtime) -> DamagedFiles:
    """Files that other ranks could not read. All ranks must leave out the same files."""
    own = damaged_on_this_rank(built)
    gathered = runtime.all_of([*own.items()] or None)
    return {file: reason for found in gathered for file, reason in found if file not in own}


def load_caches(
    config: RunConfig, wanted: Needs, caches: Caches, resources: CacheResources, stack: ExitStack, *, name: str
) -> tuple[EntrySource, EntrySource, tuple[str, ...]]:
    """Open the stores of latents and texts, in memory or on disk as the config says, and lines that describe them.

    `name` distinguishes these stores from those of the run's other epochs.
    """
    visits = visits_of(wanted.latents, _kept_in_memory(wanted.index, config.cache.vae_cache_type))
    kind = _kind(config, wanted.index)
    idle: tuple[str, ...] = ()
    if kind != "disk" and not visits:
        # An empty store in memory would look as if caching in memory worked.
        idle = (f"latents: none are kept in {kind}, because no dataset asks for it; they stay on disk",)
        kind = "disk"
    latents = _StoreLoader(f"latents-{name}", "latent_cache", kind, resources, stack).load(
        caches.stores_of(wanted.latents), visits
    )
    loader = _StoreLoader(f"texts-{name}", "text_cache", config.cache.text_cache_type, resources, stack)
    texts = loader.load(caches.stores_of(wanted.texts), visits_of(wanted.texts))
    return latents[0], texts[0], (*idle, *latents[1], *texts[1])


def _kind(config: RunConfig, index: DataIndex) -> CacheType:
    """Where latents are cached. A dataset may select memory even if the run's default is the disk."""
    if config.cache.vae_cache_type != "disk":
        return config.cache.vae_cache_type
    return "memory" if any(one.dataset.cache_latents == "memory" for one in index.datasets) else "disk"


def _kept_in_memory(index: DataIndex, default: CacheType) -> Callable[[str], bool]:
    """A predicate for datasets whose latents are kept in memory. All others are read from disk."""

    def in_memory(dataset: Dataset) -> bool:
        own = dataset.cache_latents
        return default != "disk" if own is None else own == "memory"

    return {one.id for one in (*index.datasets, *index.held_out) if in_memory(one.dataset)}.__contains__


@dataclass(frozen=True)
class _StoreLoader:
    name: str
    role: CacheRole
    kind: CacheType
    resources: CacheResources
    stack: ExitStack

    def load(self, stores: tuple[DiskStore, ...], visits: Mapping[Key, Visits]) -> tuple[EntrySource, tuple[str, ...]]:
        if not stores:
            return _NoEntries(), ()
        store = load_resident(stores, visits, name=self.name, role=self.role, kind=self.kind, resources=self.resources)
        self.stack.callback(store.close)
        report = store.report
        requested = self.resources.hints.requested  # then every cache reports what became of its hints
        plain = self.kind == "disk" and not (requested or report.damaged or report.missing)
        return store, () if plain else tuple(report.lines())


class _NoEntries:
    """The store of a run that caches nothing, because all samples are encoded in the step."""

    @property
    def stats(self) -> StoreStats:
        return StoreStats()

    def look_up(self, key: Key) -> Mapping[str, Tensor] | None:
        return None

    def read(self, key: Key) -> Entry:
        raise MissingEntryError([key], Path("(no cache)"))


def live_encoders(index: DataIndex, encoders: FamilyEncoders, keys: SampleKeys, stack: ExitStack) -> LiveEncoder:
    """Load encoders for samples with new augmentations at every visit; none if everything is cached."""
    fresh = [one for one in index.datasets if freshness(one.dataset) == "visit"]
    if not fresh:
        return LiveEncoder()
    latents = encoders.load_latents()
    stack.callback(latents.close)
    texts = None
    if keys.reads_images and any(item.references for one in fresh for item in one.items):
        texts = encoders.load_text()
        stack.callback(texts.close)
    return LiveEncoder(latents, texts)


def open_source(
    cached: CachedSamples, loader: Loader, live: LiveEncoder, runtime: Runtime, memory: UnifiedMemory | None,
    stack: ExitStack, *,
    resources: CacheResources | None = None, per_step: int | None = None, on_decision: Callable[[str],
    None] = lambda text: None,
) -> BatchSource:  # fmt: skip
    """Open the source of the run's batches. `per_step` is the number of micro-batches per optimizer step; None if it
    varies (a batch ramp)."""
    chosen = None if resources is None else resources.transport
    return stack.enter_context(
        BatchSource(
            loader, latents=cached.latents, texts=cached.texts, keys=cached.keys, device=runtime.device, live=live,
            per_step=per_step, memory=memory, mover=None if chosen is None else mover_for(chosen, runtime.device),
            on_decision=on_decision,
        )
    )  # fmt: skip
