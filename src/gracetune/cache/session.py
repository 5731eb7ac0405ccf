"""Open and fill the caches of a run, and repair them while it runs.

The text encoder is loaded and freed first, then the latent encoder.

    with Caches(cache_folders(config), writable=True) as caches:
        built = build(config, index, encoders, caches)
        built.latents.encoder, built.texts.encoder      # the encoder ids to look entries up with

`cache_type: memory` and `unified_memory` use the same stores on disk. These types determine the memory that a run reads
from; the disk stores make sure that nothing is encoded again after a crash. With `persistent_cache: false` the run
removes the entries it added at its clean end, with `remove_entries`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Protocol, TypeVar

from gracetune.cache.ai_toolkit_files import ImportReport
from gracetune.cache.ai_toolkit_import import take_latents, take_texts
from gracetune.cache.encode_passes import (
    EncodeMemoryError,
    OnProgress,
    PassOptions,
    PassOutcome,
    Share,
    encode_latents,
    encode_texts,
    nothing_to_do,
    truncation_notes,
    with_notes,
)
from gracetune.cache.encoder import EncoderId, Encoders
from gracetune.cache.errors import CacheError, EntriesError, unreadable
from gracetune.cache.folders import CacheFolders
from gracetune.cache.keys import Key
from gracetune.cache.maintenance import EntryRemoval, OnChecked, compact, forget_damaged, recheck_suspects, remove
from gracetune.cache.required_entries import (
    CacheItem,
    LatentItem,
    Part,
    TextItem,
    by_folder,
    is_refreshed,
    left_out,
    wanted_latents,
    wanted_texts,
)
from gracetune.cache.store import DiskStore
from gracetune.config.run_config import RunConfig
from gracetune.data.backends.errors import too_many
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.index import DataIndex, Exclusions
from gracetune.memory.reclaim import trim_heap
from gracetune.storage.atomic import is_temporary
from gracetune.storage.locks import is_at

_OPENINGS = 8
"""Attempts to open a store that another process keeps removing."""
MANY_SHARDS = 64
"""A store with more shards is compacted after a pass. Without an index, each start reads all shard headers."""


class Caches:
    """The stores of a run, each opened at its first use."""

    def __init__(
        self,
        folders: CacheFolders,
        *,
        writable: bool,
        before_writing: Callable[[Path, Collection[Key]], None] | None = None,
    ) -> None:
        """`before_writing`: see `DiskStore.before_writing`."""
        self.folders = folders
        self._before_writing = before_writing
        self._writable = writable
        self._open: dict[Path, DiskStore] = {}

    def store(self, folder: Path) -> DiskStore:
        if folder not in self._open:
            self._open[folder] = open_store(folder) if self._writable else DiskStore.open(folder, writable=False)
            if self._before_writing is not None:
                self._open[folder].before_writing = self._before_writing
        return self._open[folder]

    @property
    def stores(self) -> tuple[DiskStore, ...]:
        """The open stores."""
        return tuple(self._open.values())

    def stores_of(self, items: Sequence[LatentItem] | Sequence[TextItem]) -> tuple[DiskStore, ...]:
        """The stores that contain these items, opened if necessary."""
        return tuple(self.store(folder) for folder in {item.folder: None for item in items})

    def close_one(self, folder: Path) -> None:
        store = self._open.pop(folder, None)
        if store is not None:
            store.close()

    @property
    def created(self) -> dict[Path, frozenset[Key]]:
        """Keys added through these stores, by folder."""
        return {store.folder: store.created for store in self.stores if store.created}

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Caches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_store(folder: Path) -> DiskStore:
    """Open a store for writing. Tries again if another process removes the store of a past epoch at the same time.

    A store is removed by renaming its folder while its lock is held. If the lock file that was opened is no longer at
    its path, the store was removed and is opened again.
    """
    for _ in range(_OPENINGS):
        try:
            store = DiskStore.open(folder, writable=True)
        except (FileNotFoundError, CacheError) as error:
            if FileNotFoundError not in (type(error), type(error.__cause__)) and folder.exists():
                raise
            continue
        try:
            if store.users_lock is None or is_at(store.users_lock, store.folder / "users.lock"):
                return store
        except OSError as error:
            store.close()
            raise unreadable(error, folder) from error
        store.close()
    return DiskStore.open(folder, writable=True)


def remove_entries(created: Mapping[Path, Collection[Key]]) -> EntryRemoval:
    """Remove entries. Raises CacheBusyError if a store is still open."""
    removals = []
    for folder, keys in created.items():
        with open_store(folder) as store:
            removals.append(remove(store, keys))
    return EntryRemoval(sum(one.entries for one in removals), sum(one.size for one in removals))


@dataclass(frozen=True)
class Needs:
    """All entries that a run needs, and the ids of the encoders that make them."""

    text_encoder: EncoderId
    latent_encoder: EncoderId
    texts: list[TextItem]
    latents: list[LatentItem]
    index: DataIndex
    """The index that they were computed from."""

    @property
    def all(self) -> list[LatentItem | TextItem]:
        return [*self.texts, *self.latents]


@dataclass(frozen=True)
class FilledCaches:
    """The result of `build`."""

    texts: PassOutcome
    latents: PassOutcome
    index: DataIndex
    """The index without files that turned out to be damaged."""
    wanted: Needs
    """The entries that now exist: for `index`, and for the final ids of the encoders."""
    given: DataIndex
    """The index that `build` was called with."""
    plain_notes: tuple[str, ...]
    """All notes except those on truncated texts."""
    imported_texts: ImportReport | None = None
    imported_latents: ImportReport | None = None
    """Imports from ai-toolkit, if requested and if entries were missing."""

    @property
    def encoded(self) -> int:
        return self.texts.encoded + self.latents.encoded

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of this process."""
        return self.notes_of([self.texts.truncated])

    def notes_of(self, truncated: Iterable[Mapping[str, Sequence[str]]]) -> tuple[str, ...]:
        """The notes of several processes. `truncated` has the `texts.truncated` of each."""
        by_limit: dict[str, set[str]] = {}
        for one in truncated:
            for limit, texts in one.items():
                by_limit.setdefault(limit, set()).update(texts)
        return (*truncation_notes(by_limit, self.given), *self.plain_notes)


def needs(
    config: RunConfig,
    index: DataIndex,
    encoders: Encoders,
    folders: CacheFolders,
    *,
    epoch: int = 0,
    part: Part = "all",
) -> Needs:
    """Compute the entries of a run. Loads no weights."""
    text, latent = encoders.text_id(), encoders.latent_id()
    return Needs(
        text,
        latent,
        wanted_texts(
            index, text, folders, reads_images=encoders.reads_images(), prompts=encoders.prompts(config.validation),
            epoch=epoch, part=part,
        ),
        wanted_latents(index, latent, folders, epoch=epoch, part=part),
        index,
    )  # fmt: skip


def build(
    config: RunConfig,
    index: DataIndex,
    encoders: Encoders,
    caches: Caches,
    *,
    epoch: int = 0,
    part: Part = "all",
    wanted: Needs | None = None,
    check: bool = False,
    take_over: bool = False,
    options: PassOptions | None = None,
    on_text: OnProgress = lambda progress: None,
    on_latents: OnProgress = lambda progress: None,
    on_checked: OnChecked = lambda done, total: None,
    on_missing: Callable[[Sequence[LatentItem] | Sequence[TextItem]], None] = lambda items: None,
) -> FilledCaches:
    """Encode all missing entries. An encoder is loaded only if some of its entries are missing, and freed after use.

    `wanted`: the result of `needs` for the same arguments, if the caller has it. Computing it takes seconds for a large
    dataset.
    `check`: read all existing entries and encode damaged ones again. Loading into memory verifies entries too, so a run
    that does so needs no `check`.
    `take_over`: first import caches that ai-toolkit left beside the data (see ai_toolkit_import.py).
    `on_missing`: called twice before anything is encoded, with all missing texts and with all missing latents.
    The batch sizes of the config and the callbacks given here replace those of `options`.
    """
    options, given = options or PassOptions(), index

    def needs_of(index: DataIndex) -> Needs:
        return needs(config, index, encoders, caches.folders, epoch=epoch, part=part)

    wanted = wanted or needs_of(index)
    damaged = forget_damaged(caches.store, wanted.all, on_checked) if check else 0
    imported_texts = imported_latents = None
    missing_texts = missing_among(caches, wanted.texts)
    on_missing(missing_texts)
    missing_latents = missing_among(caches, wanted.latents)
    on_missing(missing_latents)
    texts = nothing_to_do(wanted.text_encoder, len(wanted.texts), index)
    if missing_texts:
        text_options = replace(options, batch_size=config.cache.text_encoder_batch_size, on_progress=on_text)
        with _loaded(encoders.load_text) as encoder:
            if take_over:
                imported_texts = take_texts(encoder, index, config.model, missing_texts, caches.store)
            texts = encode_texts(encoder, wanted.texts, index, caches.store, options=text_options)
    index = texts.index
    if index is not wanted.index:  # damaged files were excluded
        wanted = needs_of(index)
        missing_latents = missing_among(caches, wanted.latents)
    latents = nothing_to_do(wanted.latent_encoder, len(wanted.latents), index)
    if missing_latents and texts.complete:
        latent_options = replace(options, batch_size=config.cache.vae_batch_size, on_progress=on_latents)
        with _loaded(encoders.load_latents) as vae:
            if take_over:
                imported_latents = take_latents(vae, index, config.model, missing_latents, caches.store)
            latents = encode_latents(
                vae, wanted.latents, index, caches.store,
                lambda index, id_: wanted_latents(index, id_, caches.folders, epoch=epoch, part=part),
                options=latent_options,
            )  # fmt: skip
    if latents.tiled_because:
        encoders.tile(latents.tiled_because)
    if latents.index is not wanted.index or latents.encoder != wanted.latent_encoder:
        wanted = needs_of(latents.index)
    if options.share.rank == 0:
        _compact_stores(caches)
    latents = with_notes(latents, [] if part == "epoch" else left_out(latents.index))
    tiling_note = None if latents.tiled_because else encoders.tiling_note()
    notes = [*([tiling_note] if tiling_note else []), *texts.notes, *latents.notes]
    if damaged:
        entries = "1 damaged entry was" if damaged == 1 else f"{damaged} damaged entries were"
        notes.append(f"{entries} encoded again; check the disk (`dmesg`, `smartctl -a`)")
    unique_notes = tuple(dict.fromkeys(notes))
    return FilledCaches(texts, latents, latents.index, wanted, given, unique_notes, imported_texts, imported_latents)


def current_epoch(config: RunConfig, index: DataIndex, encoders: Encoders, folders: CacheFolders) -> int:
    """The epoch that commands should build while no run is training.

    That is the first complete epoch, else the first one with any entries, else 0.
    """
    started = sorted({epoch for epoch, _ in folders.epochs()}) if is_refreshed(index) else []
    with Caches(folders, writable=False) as caches:
        for epoch in started:
            items = needs(config, index, encoders, folders, epoch=epoch, part="epoch").all
            have_stores = all(is_cache(folder) for folder in by_folder(items))
            if have_stores and not missing_among(caches, items):
                return epoch
    return started[0] if started else 0


def without_unreadable(index: DataIndex, missing: Sequence[LatentItem]) -> DataIndex:
    """Exclude missing samples whose files are damaged, because no pass can encode them.

    Finding out requires decoding. It is done only for datasets with so few missing samples that a pass would accept
    all of them as damaged.
    """
    excluded = Exclusions(index)
    suspects: dict[str, dict[str, LatentItem]] = {}
    for item in missing:
        suspects.setdefault(item.dataset.id, {}).setdefault(item.item.path, item)
    for dataset in (*index.datasets, *index.held_out):
        found = suspects.get(dataset.id, {})
        if too_many(len(found), len(dataset.items), dataset.dataset.corrupt_threshold):
            continue
        for item in found.values():
            try:
                index.load(item.ref)
            except UnreadableMediaError as error:
                excluded.add(error.dataset or dataset.id, error.path, error.reason)
    return excluded.apply()


def missing_among(caches: Caches, items: Sequence[CacheItem]) -> list[CacheItem]:
    """The items that are not in the caches. If a folder is not a cache yet, all of its items are missing."""
    found: list[CacheItem] = []
    for folder, some in by_folder(items).items():
        keys = {*caches.store(folder).find([item.key for item in some]).missing} if is_cache(folder) else None
        found += some if keys is None else [item for item in some if item.key in keys]
    return found


def is_cache(folder: Path) -> bool:
    """Whether the folder contains anything but temporary files. Opening it then works or reports a foreign folder."""
    try:
        return any(not is_temporary(path.name) for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise unreadable(error, folder) from error


def _compact_stores(caches: Caches) -> None:
    for store in caches.stores:
        if store.created and len(store.catalogue.sizes) > MANY_SHARDS:
            compact(store)


class _Closable(Protocol):
    def close(self) -> None: ...


_Encoder = TypeVar("_Encoder", bound=_Closable)


@contextmanager
def _loaded(load: Callable[[], _Encoder]) -> Iterator[_Encoder]:
    encoder = load()
    try:
        yield encoder
    finally:
        encoder.close()
        trim_heap()


# -- repair during a run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class EntryRepair:
    """Repairs the entries named by an error. Call it with the error.

    The rest of a damaged file is checked too, so the encoder is loaded only once for all of its entries. The order of
    samples does not change; a rank that repairs entries only reaches the next step later.
    """

    config: RunConfig
    caches: Caches
    encoders: Encoders
    on_host: Encoders | None
    """The same encoders on the CPU, for a GPU without room for them. None if `encoders` are on the CPU anyway."""
    share: Share
    warn: Callable[[str], None]

    def __call__(self, error: EntriesError, index: DataIndex, epoch: int) -> None:
        """Make all entries that `error` lists available. `index` describes the data that the run still uses.

        Raises UnreadableMediaError if the sample's file can no longer be decoded, or another GracetuneError if encoding
        is impossible. In that case the store treats the entries as missing, so the next start encodes them.
        """
        for store in self.caches.stores:
            recheck_suspects(store)
        self.warn(f"{error.problem.key}: {error.problem.found}; check the disk (`dmesg`, `smartctl -a`)")
        if self._are_present(error):
            self.warn("the entries could be read at the second attempt; the run continues")
            return
        built = self._build(index, epoch)
        if not self._are_present(error):
            _raise_unrepaired(error, built)
        again = "1 entry" if built.encoded == 1 else f"{built.encoded} entries"
        self.warn(f"{again} encoded again; the run continues")

    def _are_present(self, error: EntriesError) -> bool:
        return all(any(Key(key) in store for store in self.caches.stores) for key in error.keys)

    def _build(self, index: DataIndex, epoch: int) -> FilledCaches:
        """Encode what is missing, and preserve the random state, so later steps are unaffected."""
        import torch

        options = PassOptions(share=self.share, may_tile=False)  # tiling would make entries under another id
        with torch.random.fork_rng():
            try:
                return build(self.config, index, self.encoders, self.caches, epoch=epoch, options=options)
            except (torch.OutOfMemoryError, EncodeMemoryError):
                if self.on_host is None:
                    raise
            return build(self.config, index, self.on_host, self.caches, epoch=epoch, options=options)


def _raise_unrepaired(error: EntriesError, built: FilledCaches) -> NoReturn:
    for damaged in (*built.texts.damaged, *built.latents.damaged):
        raise UnreadableMediaError(damaged.path, damaged.reason, damaged.dataset) from error
    raise error
