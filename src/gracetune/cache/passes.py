"""Encode passes: whatever a cache lacks is decoded ahead, encoded in batches of one shape, and written.

    wanted = needs(config, index, encoders, places)
    outcome = encode_texts(text_encoder, wanted.texts, index, caches.store, how=How(batch_size=8))
    outcome = encode_latents(latent_encoder, wanted.latents, outcome.index, caches.store, wanted_anew, how=How())

Afterwards every entry of `outcome.encoder` is there, made by this process or by another one: ranks share the work by
claiming entries (see claims.py), and wait for each other at the end. A pass may be ended at any moment, by Ctrl-C, an
error or kill -9; the next one goes on where it ended.

The id of a latent encoder may change while it works: asked to save memory it may begin to work in tiles, which gives
slightly other latents. All entries are then made anew under the new id, so that a cache never mixes the two. Where
ranks end with different `outcome.encoder`s, those with the untiled one have to run again with tiling on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.cache.encoder import CutsTexts, EncoderId, LatentEncoder, MeasuresTexts, Prompt, TextEncoder
from gracetune.cache.errors import CacheError
from gracetune.cache.pass_work import Damaged, Progress, Share, Tally, Work
from gracetune.cache.store import DiskStore
from gracetune.cache.wanted import LatentItem, TextItem
from gracetune.cache.writer import Flush
from gracetune.data.index import DataIndex
from gracetune.data.media.load import Sample
from gracetune.data.refs import Bucket
from gracetune.data.words import counted, some
from gracetune.errors import Problem

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry

__all__ = ["Damaged", "EncodeMemoryError", "How", "Outcome", "Progress", "Share", "encode_latents", "encode_texts"]

StoreOf = Callable[[Path], DiskStore]
OnProgress = Callable[[Progress], None]


class EncodeMemoryError(CacheError):
    """Not even one sample can be encoded in the memory there is."""


@dataclass(frozen=True)
class How:
    """How a pass is carried out."""

    batch_size: int = 1
    share: Share = field(default_factory=Share)
    workers: int = 4
    """Threads that decode."""
    on_progress: OnProgress = lambda progress: None
    """Called in the thread of the pass, after every batch."""
    flush: Flush = field(default_factory=Flush)
    """How much a killed process may lose."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set by another thread: the pass ends after the batch it is at."""
    may_tile: bool = True
    """Whether latents may be made in tiles where memory does not suffice otherwise. Then all of them are made so."""


@dataclass(frozen=True)
class Outcome:
    encoder: EncoderId
    """As the encoder ended: the id of the entries that are there now."""
    wanted: int
    encoded: int
    encoded_bytes: int
    by_others: int
    """Missing when the pass began, and made by another process meanwhile."""
    there_before: int
    index: DataIndex
    """Without the files that turned out to be damaged."""
    damaged: tuple[Damaged, ...] = ()
    batch_size: int = 0
    """The smallest that was used."""
    seconds: float = 0.0
    complete: bool = True
    """False where it was stopped."""
    cut: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of texts: see `CutsTexts`."""
    tiled_because: str = ""
    """Why the encoder ended with another id than it began with."""
    notes: tuple[str, ...] = ()


def encode_latents(
    encoder: LatentEncoder,
    items: Sequence[LatentItem],
    index: DataIndex,
    store_of: StoreOf,
    wanted_anew: Callable[[DataIndex, EncoderId], list[LatentItem]],
    *,
    how: How | None = None,
) -> Outcome:
    """`items` are those of the encoder's id; `wanted_anew` gives those of another.

    Raises EncodeMemoryError, CacheFullError, UnreadableFilesError (more than the threshold), ...
    """
    how = how or How()
    tally = Tally()
    relief = _Relief(encoder, may_tile=how.may_tile)
    while True:
        identity = encoder.id
        _check_id(identity, items)
        work: Work[LatentItem, Sample] = Work(
            items, store_of, index, tally,
            decode=_decode_latent, encode=partial(_encode_latents, encoder), relieve=relief.ask,
            batch_size=how.batch_size, limits=relief.limits, workers=how.workers, share=how.share, flush=how.flush,
            on_progress=how.on_progress, stop=how.stop,
        )  # fmt: skip
        try:
            complete = work.run()
        except _OtherIdError:
            index = work.index
            items = wanted_anew(index, encoder.id)
            continue
        found = _outcome(identity, len(items), work.index, tally, complete=complete, notes=relief.notes)
        return replace(found, tiled_because=relief.tiled_because)


def encode_texts(
    encoder: TextEncoder,
    items: Sequence[TextItem],
    index: DataIndex,
    store_of: StoreOf,
    *,
    how: How | None = None,
) -> Outcome:
    how = how or How()
    tally = Tally()
    _check_id(encoder.id, items)

    def lengths(missing: Sequence[TextItem]) -> Sequence[int]:
        if not isinstance(encoder, MeasuresTexts):
            return [0] * len(missing)
        return encoder.lengths([item.text for item in missing])

    work: Work[TextItem, Prompt] = Work(
        items, store_of, index, tally,
        decode=_decode_text, encode=encoder.encode, relieve=_no_text_relief, lengths=lengths,
        batch_size=how.batch_size, limits=[], workers=how.workers, share=how.share, flush=how.flush,
        on_progress=how.on_progress, stop=how.stop,
    )  # fmt: skip
    complete = work.run()
    cut = {limit: tuple(texts) for limit, texts in encoder.cut.items()} if isinstance(encoder, CutsTexts) else {}
    return replace(_outcome(encoder.id, len(items), work.index, tally, complete=complete), cut=cut)


def about_cut_texts(cut: Mapping[str, set[str]], index: DataIndex) -> list[str]:
    """One note for each limit, however many texts go beyond it."""
    notes = []
    for limit, long in cut.items():
        datasets = (*index.datasets, *index.held_out)
        paths = [item.path for one in datasets for item in one.items if not long.isdisjoint(item.captions)]
        prompts = long - {*index.captions()}
        what = [f"{counted(len(paths), 'sample')}: {some(paths)}"] if paths else []
        what += [f"{counted(len(prompts), 'validation prompt')}"] if prompts else []
        notes.append(f"captions longer than {limit}, of which only the beginning is read: {'; '.join(what)}")
    return notes


def _check_id(encoder: EncoderId, items: Sequence[LatentItem | TextItem]) -> None:
    """Entries of one encoder must never be kept under the keys of another."""
    if items and items[0].encoder != encoder:
        raise ValueError(f"entries wanted of {items[0].encoder}, and {encoder} is there to make them")


def _outcome(
    encoder: EncoderId, wanted: int, index: DataIndex, tally: Tally, *, complete: bool, notes: Iterable[str] = ()
) -> Outcome:
    words = [*notes]
    if tally.smallest < tally.largest:
        words.append(
            f"memory ran out at batches of {tally.largest}: the smallest were of {tally.smallest}; "
            "a smaller cache.vae_batch_size or text_encoder_batch_size saves the attempts"
        )
    words += [f"left out, unreadable: {one.path} of {one.dataset}: {one.reason}" for one in tally.damaged.values()]
    return Outcome(
        encoder,
        wanted,
        tally.encoded,
        tally.encoded_bytes,
        tally.by_others,
        tally.there_before,
        index,
        damaged=tuple(tally.damaged.values()),
        batch_size=tally.smallest,
        seconds=tally.seconds,
        complete=complete,
        notes=tuple(words),
    )


def _decode_latent(index: DataIndex, item: LatentItem) -> Sample:
    return index.load(item.ref)


def _encode_latents(encoder: LatentEncoder, samples: list[Sample]) -> list[Entry]:
    return encoder.encode(samples)


def _decode_text(index: DataIndex, item: TextItem) -> Prompt:
    return Prompt(item.text, tuple(index.load(picture) for picture in item.pictures))


# -- when memory runs out ---------------------------------------------------------------------------------------------


class _OtherIdError(Exception):
    """The encoder goes on under another id: what it makes from here on are other entries."""


class _Relief:
    """What is tried when one sample does not fit, as long as the encoder knows something."""

    def __init__(self, encoder: LatentEncoder, *, may_tile: bool) -> None:
        self._encoder, self._may_tile = encoder, may_tile
        self.limits: list[tuple[int, int]] = []
        self.notes: list[str] = []
        self.tiled_because = ""

    def ask(self, item: LatentItem) -> None:
        before = self._encoder.id
        what = f"latents of {_named(item.shape)} ({item.what})"
        if not self._encoder.save_memory():
            raise EncodeMemoryError(_no_memory(what, tiled=True))
        if self._encoder.id == before:
            return
        if not self._may_tile:
            raise EncodeMemoryError(_no_tiles(what))
        self.tiled_because = f"one sample of {_named(item.shape)} did not fit"
        changed = sorted({*dict(self._encoder.id.settings).items()} - {*dict(before.settings).items()})
        parts = ", ".join(f"{name}: {value}" for name, value in changed)
        self.notes.append(
            f"{self.tiled_because}: all latents are made with {parts}, now and the next time; "
            "`gracetune cache clear` forgets it, model.vae_tiling: true says so in the config"
        )
        raise _OtherIdError


def _no_text_relief(item: TextItem) -> None:
    seen = f" with pictures of {_named(item.shape)}" if item.pictures else ""
    raise EncodeMemoryError(_no_memory(f"one text{seen} ({item.what})", tiled=False))


def _no_memory(what: str, *, tiled: bool) -> Problem:
    smaller = "a smaller datasets[N].resolution or video.num_frames" if tiled else "a smaller text encoder"
    return Problem(
        key=f"encoding {what}",
        found="out of memory with one sample at a time" + (", in slices and tiles" if tiled else ""),
        expected="memory for one sample",
        hint=f"free the device (`nvidia-smi` shows who uses it), or choose {smaller}; what is encoded stays",
    )


def _no_tiles(what: str) -> Problem:
    return Problem(
        key=f"encoding {what}",
        found="out of memory with one sample at a time, in slices",
        expected="memory for one sample: this run's other latents are made without tiles, and a cache never mixes them",
        hint="--set model.vae_tiling=true makes all of them in tiles; or free memory on the device",
    )


def _named(shape: tuple[Bucket, ...]) -> str:
    """`1024x768x81 and 512x512`."""
    return " and ".join(_bucket(bucket) for bucket in shape) or "no picture"


def _bucket(bucket: Bucket) -> str:
    if bucket.audio_samples:
        return f"{counted(bucket.audio_samples, 'sound sample')} x {bucket.audio_channels}"
    frames = f"x{bucket.frames}" if bucket.frames > 1 else ""
    return f"bucket {bucket.width}x{bucket.height}{frames}"


def nothing_to_do(encoder: EncoderId, wanted: int, index: DataIndex) -> Outcome:
    """Of a pass that need not be carried out."""
    return Outcome(encoder, wanted, 0, 0, 0, wanted, index)


def with_notes(outcome: Outcome, notes: Iterable[str]) -> Outcome:
    return replace(outcome, notes=(*outcome.notes, *notes))
