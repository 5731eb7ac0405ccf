"""The caches of a run, opened and filled: text encoder first, gone again, then the latent encoder.

    with Caches(places_of(config), writable=True) as caches:
        built = build(config, index, encoders, caches)
        built.latents.encoder, built.texts.encoder      # the ids the entries are found by

`cache_type: memory` and `unified_memory` go through the same stores on disk: they say from where a run reads, not
whether it may encode everything again after a crash. With `persistent_cache: false` the run calls `remove_entries`
at its clean end, and what it added is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

from gracetune.cache.checking import OnChecked, forget_damaged
from gracetune.cache.encoder import EncoderId, LatentEncoder, TextEncoder
from gracetune.cache.errors import CacheError, unreadable
from gracetune.cache.imports import ImportReport
from gracetune.cache.keys import Key
from gracetune.cache.passes import (
    How,
    OnProgress,
    Outcome,
    about_cut_texts,
    encode_latents,
    encode_texts,
    nothing_to_do,
    with_notes,
)
from gracetune.cache.places import Places
from gracetune.cache.store import DiskStore
from gracetune.cache.takeover import take_latents, take_texts
from gracetune.cache.upkeep import Removal, compact, remove
from gracetune.cache.wanted import (
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
from gracetune.config.run_config import RunConfig, Validation
from gracetune.data.backends.errors import too_many
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.index import DataIndex, Exclusions
from gracetune.memory.reclaim import trim_heap
from gracetune.storage.atomic import is_temporary
from gracetune.storage.locks import is_at

_OPENINGS = 8
MANY_SHARDS = 64
"""So many files are merged after a pass; each start reads all of their headers where the index is lost."""


class Encoders(Protocol):
    """The two encoders of a model; `models.encoders` has them for every family."""

    def text_id(self) -> EncoderId:
        """Without loading any weight, as the three that follow."""

    def reads_pictures(self) -> bool: ...

    def latent_id(self) -> EncoderId: ...

    def prompts(self, validation: Validation) -> list[str]:
        """The texts samples are drawn with, worded as this model wants them (`wanted.validation_texts`).

        None where it draws its samples from texts: nobody would read their embeddings.
        """

    def load_text(self) -> TextEncoder: ...

    def load_latents(self) -> LatentEncoder: ...

    def tile(self, why: str) -> None:
        """Latents are made in tiles from here on, also after the next start; `latent_id` says so."""

    def tiling_note(self) -> str | None:
        """In words, where tiles were asked for by an earlier start."""

    def forget_tiling(self) -> None:
        """The next start tries without again, unless its config asks for tiles."""


class Caches:
    """Stores, each opened when it is first asked for."""

    def __init__(
        self, places: Places, *, writable: bool, before_writing: Callable[[Path, Collection[Key]], None] | None = None
    ) -> None:
        """`before_writing`: see `DiskStore`."""
        self.places = places
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
        """Those that are open."""
        return tuple(self._open.values())

    def stores_of(self, items: Sequence[LatentItem] | Sequence[TextItem]) -> tuple[DiskStore, ...]:
        """What a resident store of these items is loaded from."""
        return tuple(self.store(folder) for folder in {item.folder: None for item in items})

    def close_one(self, folder: Path) -> None:
        store = self._open.pop(folder, None)
        if store is not None:
            store.close()

    @property
    def created(self) -> dict[Path, frozenset[Key]]:
        """What was added through these stores."""
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
    """For writing; anew where another process took the empty store of a past epoch away at this very moment.

    A store is taken away whole, by renaming its folder, while its lock is held: so what was opened is either at its
    place, or has to be opened again.
    """
    for _ in range(_OPENINGS):
        try:
            store = DiskStore.open(folder, writable=True)
        except (FileNotFoundError, CacheError) as error:
            if FileNotFoundError not in (type(error), type(error.__cause__)) and folder.exists():
                raise
            continue
        try:
            if store.users is None or is_at(store.users, store.folder / "users.lock"):
                return store
        except OSError as error:
            store.close()
            raise unreadable(error, folder) from error
        store.close()
    return DiskStore.open(folder, writable=True)


def remove_entries(created: Mapping[Path, Collection[Key]]) -> Removal:
    """From stores that nobody has open any more. CacheBusyError."""
    removals = []
    for folder, keys in created.items():
        with open_store(folder) as store:
            removals.append(remove(store, keys))
    return Removal(sum(one.entries for one in removals), sum(one.size for one in removals))


@dataclass(frozen=True)
class Needs:
    """All entries a run wants, and under which ids."""

    text_encoder: EncoderId
    latent_encoder: EncoderId
    texts: list[TextItem]
    latents: list[LatentItem]
    index: DataIndex
    """Whose samples they are of."""

    @property
    def all(self) -> list[LatentItem | TextItem]:
        return [*self.texts, *self.latents]


@dataclass(frozen=True)
class Built:
    texts: Outcome
    latents: Outcome
    index: DataIndex
    """Without the files that turned out to be damaged."""
    wanted: Needs
    """As the entries are now: of `index`, and of the ids the encoders ended with."""
    given: DataIndex
    """What the pass began with."""
    plain_notes: tuple[str, ...]
    imported_texts: ImportReport | None = None
    imported_latents: ImportReport | None = None
    """What was taken over from ai-toolkit, where that was asked for and something was missing."""

    @property
    def encoded(self) -> int:
        return self.texts.encoded + self.latents.encoded

    @property
    def notes(self) -> tuple[str, ...]:
        """Of this process."""
        return self.notes_of([self.texts.cut])

    def notes_of(self, cut: Iterable[Mapping[str, Sequence[str]]]) -> tuple[str, ...]:
        """`cut`: the `texts.cut` of every process that took part."""
        long: dict[str, set[str]] = {}
        for one in cut:
            for limit, texts in one.items():
                long.setdefault(limit, set()).update(texts)
        return (*about_cut_texts(long, self.given), *self.plain_notes)


def needs(
    config: RunConfig, index: DataIndex, encoders: Encoders, places: Places, *, epoch: int = 0, part: Part = "all"
) -> Needs:
    """Nothing is loaded."""
    text, latent = encoders.text_id(), encoders.latent_id()
    return Needs(
        text,
        latent,
        wanted_texts(
            index, text, places, reads_pictures=encoders.reads_pictures(), prompts=encoders.prompts(config.validation),
            epoch=epoch, part=part,
        ),
        wanted_latents(index, latent, places, epoch=epoch, part=part),
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
    how: How | None = None,
    on_text: OnProgress = lambda progress: None,
    on_latents: OnProgress = lambda progress: None,
    on_checked: OnChecked = lambda done, total: None,
    on_missing: Callable[[Sequence[LatentItem] | Sequence[TextItem]], None] = lambda items: None,
) -> Built:
    """Encode whatever is missing. An encoder nothing is missing of is not loaded; each is gone when its pass ends.

    `wanted` is what `needs` says of the same, where that is known: for a large dataset it takes seconds.
    `check` reads every entry that is there; damaged ones are made again. Loading them into memory checks them too.
    `take_over` looks for caches of ai-toolkit beside the data before anything is encoded (see takeover.py).
    `on_missing` gets what is missing of either kind, all or nothing of it, before anything is encoded.
    The batch sizes and callbacks of `how` are replaced by the config's and by those given here.
    """
    how, given = how or How(), index

    def anew(index: DataIndex) -> Needs:
        return needs(config, index, encoders, caches.places, epoch=epoch, part=part)

    wanted = wanted or anew(index)
    damaged = forget_damaged(caches.store, wanted.all, on_checked) if check else 0
    spoken = pictured = None
    missing_texts = missing_among(caches, wanted.texts)
    on_missing(missing_texts)
    missing_latents = missing_among(caches, wanted.latents)
    on_missing(missing_latents)
    texts = nothing_to_do(wanted.text_encoder, len(wanted.texts), index)
    if missing_texts:
        text_how = replace(how, batch_size=config.cache.text_encoder_batch_size, on_progress=on_text)
        with _loaded(encoders.load_text) as encoder:
            if take_over:
                spoken = take_texts(encoder, index, config.model, missing_texts, caches.store)
            texts = encode_texts(encoder, wanted.texts, index, caches.store, how=text_how)
    index = texts.index
    if index is not wanted.index:
        wanted = anew(index)
        missing_latents = missing_among(caches, wanted.latents)
    latents = nothing_to_do(wanted.latent_encoder, len(wanted.latents), index)
    if missing_latents and texts.complete:
        latent_how = replace(how, batch_size=config.cache.vae_batch_size, on_progress=on_latents)
        with _loaded(encoders.load_latents) as vae:
            if take_over:
                pictured = take_latents(vae, index, config.model, missing_latents, caches.store)
            latents = encode_latents(
                vae, wanted.latents, index, caches.store,
                lambda index, id_: wanted_latents(index, id_, caches.places, epoch=epoch, part=part), how=latent_how,
            )  # fmt: skip
    if latents.tiled_because:
        encoders.tile(latents.tiled_because)
    if latents.index is not wanted.index or latents.encoder != wanted.latent_encoder:
        wanted = anew(latents.index)
    if how.share.rank == 0:
        _tidy(caches)
    latents = with_notes(latents, [] if part == "epoch" else left_out(latents.index))
    said = None if latents.tiled_because else encoders.tiling_note()
    notes = [*([said] if said else []), *texts.notes, *latents.notes]
    if damaged:
        again = "1 damaged entry" if damaged == 1 else f"{damaged} damaged entries"
        notes.append(f"{again} made again; look at the disk (`dmesg`, `smartctl -a`)")
    return Built(texts, latents, latents.index, wanted, given, tuple(dict.fromkeys(notes)), spoken, pictured)


def current_epoch(config: RunConfig, index: DataIndex, encoders: Encoders, places: Places) -> int:
    """The epoch whose entries are to be there when nobody trains: the first that is complete, else the first begun."""
    begun = sorted({epoch for epoch, _ in places.epochs()}) if is_refreshed(index) else []
    with Caches(places, writable=False) as caches:
        for epoch in begun:
            items = needs(config, index, encoders, places, epoch=epoch, part="epoch").all
            there = all(is_cache(folder) for folder in by_folder(items))
            if there and not missing_among(caches, items):
                return epoch
    return begun[0] if begun else 0


def without_unreadable(index: DataIndex, missing: Sequence[LatentItem]) -> DataIndex:
    """Without those of the missing samples that no pass could encode, because their files are damaged.

    Only where so few of a dataset are missing that this can be the reason: each of them is decoded.
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
    """A folder that is no cache yet has none of its items."""
    found: list[CacheItem] = []
    for folder, some in by_folder(items).items():
        keys = {*caches.store(folder).find([item.key for item in some]).missing} if is_cache(folder) else None
        found += some if keys is None else [item for item in some if item.key in keys]
    return found


def is_cache(folder: Path) -> bool:
    """Whether there is anything to open. A folder of somebody else's is an error then; one being made is none yet."""
    try:
        return any(not is_temporary(path.name) for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise unreadable(error, folder) from error


def _tidy(caches: Caches) -> None:
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
