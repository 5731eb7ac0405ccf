"""Encode passes: decode, encode and store all missing entries of a cache.

    wanted = needs(config, index, encoders, caches.folders)  # from cache.session
    outcome = encode_texts(text_encoder, wanted.texts, index, caches.store, options=PassOptions(batch_size=8))
    outcome = encode_latents(latent_encoder, wanted.latents, outcome.index, caches.store, items_for)

After a pass, all entries for `outcome.encoder` exist. Other processes may have encoded some of them: ranks divide the
work by claiming entries (see pass_worker.py) and wait for each other at the end. A pass can be interrupted at any
moment by Ctrl-C, an error or kill -9. The next pass continues where it stopped.

The id of a latent encoder may change during a pass. To save memory, the encoder may switch to tiling, which gives
slightly different latents. All entries are then encoded again under the new id, so a cache never mixes the two. If
ranks end with different values of `outcome.encoder`, those that did not tile must run again with tiling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.cache.encoder import EncoderId, LatentEncoder, MeasuresTexts, Prompt, ReportsTruncation, TextEncoder
from gracetune.cache.errors import CacheError
from gracetune.cache.pass_worker import DamagedItem, PassCounts, PassProgress, PassWorker, Share
from gracetune.cache.required_entries import LatentItem, TextItem
from gracetune.cache.store import DiskStore
from gracetune.cache.writer import Flush
from gracetune.data.index import DataIndex
from gracetune.data.media.load import Sample
from gracetune.data.refs import Bucket
from gracetune.data.text_format import counted, some
from gracetune.errors import Problem

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry

__all__ = [
    "DamagedItem",
    "EncodeMemoryError",
    "PassOptions",
    "PassOutcome",
    "PassProgress",
    "Share",
    "encode_latents",
    "encode_texts",
]

StoreOf = Callable[[Path], DiskStore]
OnProgress = Callable[[PassProgress], None]


class EncodeMemoryError(CacheError):
    """The available memory does not suffice to encode a single sample."""


@dataclass(frozen=True)
class PassOptions:
    """Options of a pass."""

    batch_size: int = 1
    share: Share = field(default_factory=Share)
    workers: int = 4
    """Number of decoding threads."""
    on_progress: OnProgress = lambda progress: None
    """Called after every batch, in the thread of the pass."""
    flush: Flush = field(default_factory=Flush)
    """Limits how much work a killed process loses."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Another thread sets it to end the pass after the current batch."""
    may_tile: bool = True
    """Whether latents may be made with tiling if memory is short. In that case all of them are."""


@dataclass(frozen=True)
class PassOutcome:
    """The result of a pass."""

    encoder: EncoderId
    """The final id of the encoder, under which the entries are stored."""
    wanted: int
    """All entries that the run needs, whether or not they existed before."""
    encoded: int
    """Entries that this process encoded. After a switch to tiling this includes those from before it, which were made
    in vain."""
    encoded_bytes: int
    by_others: int
    """Entries that were missing when the pass started and that other processes encoded."""
    found_before: int
    """Entries that existed when the pass started."""
    index: DataIndex
    """The index without files that turned out to be damaged."""
    damaged: tuple[DamagedItem, ...] = ()
    batch_size: int = 0
    """The smallest batch size used."""
    seconds: float = 0.0
    complete: bool = True
    """False if the pass was stopped."""
    truncated: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Truncated texts; see `ReportsTruncation`."""
    tiled_because: str = ""
    """Why the encoder switched to tiling; empty if it did not."""
    notes: tuple[str, ...] = ()


def encode_latents(
    encoder: LatentEncoder,
    items: Sequence[LatentItem],
    index: DataIndex,
    store_of: StoreOf,
    items_for: Callable[[DataIndex, EncoderId], list[LatentItem]],
    *,
    options: PassOptions | None = None,
) -> PassOutcome:
    """Encode the missing latents among `items`, which must be for the encoder's current id.

    `items_for` returns the items for another id of the encoder. It is called if the encoder switches to tiling.
    Raises EncodeMemoryError, CacheFullError, UnreadableFilesError (more damaged files than the threshold), ...
    """
    options = options or PassOptions()
    tally = PassCounts()
    saver = _MemorySaver(encoder, may_tile=options.may_tile)
    while True:
        identity = encoder.id
        _check_id(identity, items)
        work: PassWorker[LatentItem, Sample] = PassWorker(
            items, store_of, index, tally,
            decode=_decode_latent, encode=partial(_encode_latents, encoder), save_memory=saver.save_memory,
            batch_size=options.batch_size, limits=saver.limits, workers=options.workers, share=options.share,
            flush=options.flush,
            on_progress=options.on_progress, stop=options.stop,
        )  # fmt: skip
        try:
            complete = work.run()
        except _IdChangedError:
            index = work.index
            items = items_for(index, encoder.id)
            continue
        found = _outcome(identity, len(items), work.index, tally, complete=complete, notes=saver.notes)
        return replace(found, tiled_because=saver.tiled_because)


def encode_texts(
    encoder: TextEncoder,
    items: Sequence[TextItem],
    index: DataIndex,
    store_of: StoreOf,
    *,
    options: PassOptions | None = None,
) -> PassOutcome:
    """Encode the missing embeddings among `items`."""
    options = options or PassOptions()
    tally = PassCounts()
    _check_id(encoder.id, items)

    def lengths(missing: Sequence[TextItem]) -> Sequence[int]:
        if not isinstance(encoder, MeasuresTexts):
            return [0] * len(missing)
        return encoder.lengths([item.text for item in missing])

    work: PassWorker[TextItem, Prompt] = PassWorker(
        items, store_of, index, tally,
        decode=_decode_text, encode=encoder.encode, save_memory=_reject_large_text, lengths=lengths,
        batch_size=options.batch_size, limits=[], workers=options.workers, share=options.share, flush=options.flush,
        on_progress=options.on_progress, stop=options.stop,
    )  # fmt: skip
    complete = work.run()
    truncated = (
        {limit: tuple(texts) for limit, texts in encoder.truncated.items()}
        if isinstance(encoder, ReportsTruncation)
        else {}
    )
    return replace(_outcome(encoder.id, len(items), work.index, tally, complete=complete), truncated=truncated)


def truncation_notes(truncated: Mapping[str, set[str]], index: DataIndex) -> list[str]:
    """One note per limit on the texts that exceed it."""
    notes = []
    for limit, long in truncated.items():
        datasets = (*index.datasets, *index.held_out)
        paths = [item.path for one in datasets for item in one.items if not long.isdisjoint(item.captions)]
        prompts = long - {*index.captions()}
        affected = [f"{counted(len(paths), 'sample')}: {some(paths)}"] if paths else []
        affected += [f"{counted(len(prompts), 'validation prompt')}"] if prompts else []
        notes.append(f"captions longer than {limit} are truncated: {'; '.join(affected)}")
    return notes


def _check_id(encoder: EncoderId, items: Sequence[LatentItem | TextItem]) -> None:
    """Entries of one encoder must never be stored under the keys of another."""
    if items and items[0].encoder != encoder:
        raise ValueError(f"these items are for the encoder {items[0].encoder}, not for {encoder}")


def _outcome(
    encoder: EncoderId, wanted: int, index: DataIndex, tally: PassCounts, *, complete: bool, notes: Iterable[str] = ()
) -> PassOutcome:
    all_notes = [*notes]
    if tally.smallest < tally.largest:
        all_notes.append(
            f"out of memory with batches of {tally.largest}, so batches of {tally.smallest} were used; "
            "a smaller cache.vae_batch_size or text_encoder_batch_size avoids the failed attempts"
        )
    all_notes += [f"left out, unreadable: {one.path} of {one.dataset}: {one.reason}" for one in tally.damaged.values()]
    return PassOutcome(
        encoder,
        wanted=wanted,
        encoded=tally.encoded,
        encoded_bytes=tally.encoded_bytes,
        by_others=tally.by_others,
        found_before=tally.found_before,
        index=index,
        damaged=tuple(tally.damaged.values()),
        batch_size=tally.smallest,
        seconds=tally.seconds,
        complete=complete,
        notes=tuple(all_notes),
    )


def _decode_latent(index: DataIndex, item: LatentItem) -> Sample:
    return index.load(item.ref)


def _encode_latents(encoder: LatentEncoder, samples: list[Sample]) -> list[Entry]:
    return encoder.encode(samples)


def _decode_text(index: DataIndex, item: TextItem) -> Prompt:
    return Prompt(item.text, tuple(index.load(image) for image in item.images))


# -- out of memory ----------------------------------------------------------------------------------------------------


class _IdChangedError(Exception):
    """The encoder switched to tiling, which changes its id: all entries must be made again."""


class _MemorySaver:
    """Makes a latent encoder save memory when a single sample does not fit: first slicing, then tiling."""

    def __init__(self, encoder: LatentEncoder, *, may_tile: bool) -> None:
        self._encoder, self._may_tile = encoder, may_tile
        self.limits: list[tuple[int, int]] = []
        """Pairs of volume and batch size, which `PassWorker` adds when memory runs out. They outlast a switch to
        tiling."""
        self.notes: list[str] = []
        self.tiled_because = ""

    def save_memory(self, item: LatentItem) -> None:
        before = self._encoder.id
        what = f"latents of {_shape_text(item.shape)} ({item.what})"
        if not self._encoder.save_memory():
            raise EncodeMemoryError(_no_memory(what, tiled=True))
        if self._encoder.id == before:
            return
        if not self._may_tile:
            raise EncodeMemoryError(_no_tiles(what))
        self.tiled_because = f"one sample of {_shape_text(item.shape)} did not fit into memory"
        changed = sorted({*dict(self._encoder.id.settings).items()} - {*dict(before.settings).items()})
        settings = ", ".join(f"{name}: {value}" for name, value in changed)
        self.notes.append(
            f"{self.tiled_because}: all latents are made with {settings}, now and in later starts; "
            "`gracetune cache clear` undoes this, and model.vae_tiling: true makes it explicit in the config"
        )
        raise _IdChangedError


def _reject_large_text(item: TextItem) -> None:
    images = f" with images of {_shape_text(item.shape)}" if item.images else ""
    raise EncodeMemoryError(_no_memory(f"one text{images} ({item.what})", tiled=False))


def _no_memory(what: str, *, tiled: bool) -> Problem:
    smaller = "a smaller datasets[N].resolution or video.num_frames" if tiled else "a smaller text encoder"
    return Problem(
        key=f"encoding {what}",
        found="out of memory with one sample at a time" + (", in slices and tiles" if tiled else ""),
        expected="enough memory for one sample",
        hint=f"free GPU memory (`nvidia-smi` lists processes), or use {smaller}; entries already encoded are kept",
    )


def _no_tiles(what: str) -> Problem:
    return Problem(
        key=f"encoding {what}",
        found="out of memory with one sample at a time, in slices",
        expected="enough memory for one sample; the other latents were made without tiling, and the two never mix",
        hint="pass --set model.vae_tiling=true to make all latents with tiling, or free GPU memory",
    )


def _shape_text(shape: tuple[Bucket, ...]) -> str:
    """`bucket 1024x768x81 and bucket 512x512`."""
    return " and ".join(_bucket_text(bucket) for bucket in shape) or "no image"


def _bucket_text(bucket: Bucket) -> str:
    if bucket.audio_samples:
        return f"{counted(bucket.audio_samples, 'audio sample')} x {bucket.audio_channels}"
    frames = f"x{bucket.frames}" if bucket.frames > 1 else ""
    return f"bucket {bucket.width}x{bucket.height}{frames}"


def nothing_to_do(encoder: EncoderId, wanted: int, index: DataIndex) -> PassOutcome:
    """The outcome of a pass without missing entries."""
    return PassOutcome(
        encoder, wanted=wanted, encoded=0, encoded_bytes=0, by_others=0, found_before=wanted, index=index
    )


def with_notes(outcome: PassOutcome, notes: Iterable[str]) -> PassOutcome:
    return replace(outcome, notes=(*outcome.notes, *notes))
