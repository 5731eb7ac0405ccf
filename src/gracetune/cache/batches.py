"""The source of batches: takes references from the loader and entries from the caches, returns tensors on the device.

    with BatchSource(loader, latents=latents, texts=texts, keys=keys, device=device, depth=2) as source:
        while not isinstance(outcome := source.next(size, step=step), Exhausted): ...

The source peeks at the loader and prepares the next batches while the current one is used. It discards prepared
batches that turn out to be wrong (another size was requested, a dataset ended). The loader advances only when a batch
is returned, so its saved state never includes prefetched batches. With `depth=0` nothing is prepared ahead; the batches
are the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gracetune.cache.collate import UnlikeEntriesError, collate
from gracetune.cache.encoder import EncoderId, LatentEncoder, PerUse, Prompt, TextEncoder
from gracetune.cache.errors import CacheError, CorruptEntryError, MissingEntryError
from gracetune.cache.keys import Key, latent_key, text_key
from gracetune.cache.resident import ResidentStore
from gracetune.cache.stats import SourceStats, StoreStats, add_cache_stats
from gracetune.data.index import freshness
from gracetune.data.loader import EpochEnd, Exhausted, Loader
from gracetune.data.media.load import Sample
from gracetune.data.refs import BatchRef, SampleRef
from gracetune.errors import Problem
from gracetune.memory.lookahead import InPlace, LookAhead, Mover, OnDepth, RingMover
from gracetune.memory.placement import StepWaits, rehome
from gracetune.memory.stacked import Stacked

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gracetune.memory.unified_memory import UnifiedMemory

    Fetch = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]
    """An entry, or a function that waits for it."""

K = TypeVar("K")
V = TypeVar("V")

MOST_KEPT_KEYS = 1 << 15
"""Keys to memoize, about 1 KB each."""
BATCHES_PER_CHECK = 32
"""Batches between two checks of how long steps wait for data."""
READ_BEYOND = 2
"""Batches beyond the look-ahead whose entries are already being read from disk or decoded."""


class EntrySource(Protocol):
    """The interface that a batch source needs from a cache. `ResidentStore` implements it."""

    @property
    def stats(self) -> StoreStats: ...

    def look_up(self, key: Key) -> Mapping[str, Tensor] | None:
        """The entry if it is available without I/O, else None."""

    def read(self, key: Key) -> Mapping[str, Tensor]:
        """Read the entry from disk. Called in worker threads."""


@dataclass(frozen=True)
class SampleKeys:
    """Computes the cache keys of a sample."""

    latent: EncoderId
    text: EncoderId
    reads_images: bool = False
    """Whether text embeddings also depend on the sample's reference images."""
    per_use: PerUse | None = None
    """Makes tensors that replace cached ones each time a sample is used."""

    def of_latent(self, ref: SampleRef) -> Key:
        return latent_key(ref, self.latent)

    def of_text(self, ref: SampleRef) -> Key:
        """The key of the caption. A dropped caption has one too: the text `captions.dropped_caption` is also cached."""
        return text_key(ref.caption.text, self.text, ref.conditioning if self.reads_images else ())

    def used(self, entry: Mapping[str, Tensor], ref: SampleRef) -> Mapping[str, Tensor]:
        """The entry with the tensors that `per_use` replaces."""
        return entry if self.per_use is None else {**entry, **self.per_use(ref)}


class _KeyMemo:
    """Memoizes keys. The index returns the same reference object whenever a sample looks the same."""

    def __init__(self, keys: SampleKeys) -> None:
        self._keys = keys
        self._latent: dict[int, tuple[SampleRef, Key]] = {}
        """By id() of the reference. The value keeps the reference alive, so its id() is not reused."""
        self._text: dict[tuple[str, tuple[SampleRef, ...]], Key] = {}

    def of_latent(self, ref: SampleRef) -> Key:
        found = self._latent.get(id(ref))
        if found is None:
            found = _bounded(self._latent)[id(ref)] = (ref, self._keys.of_latent(ref))
        return found[1]

    def of_text(self, ref: SampleRef) -> Key:
        inputs = (ref.caption.text, ref.conditioning)
        key = self._text.get(inputs)
        if key is None:
            key = _bounded(self._text)[inputs] = self._keys.of_text(ref)
        return key


def _bounded(memo: dict[K, V]) -> dict[K, V]:
    if len(memo) >= MOST_KEPT_KEYS:
        memo.clear()
    return memo


@dataclass(frozen=True)
class LiveEncoder:
    """Encoders for samples that are not cached because they look different at every visit."""

    latents: LatentEncoder | None = None
    texts: TextEncoder | None = None
    """Needed only if embeddings depend on such images."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The input of one training step. Valid until the next call of `BatchSource.next`."""

    ref: BatchRef
    tensors: Mapping[str, Tensor]
    """On the device, with a leading batch dimension; for the names see `cache.encoder`. Read-only: where batches are
    read in place, the tensors of a batch of one sample are views of the cache."""


class BatchSource:
    """The batches of one rank, for its training step."""

    def __init__(
        self,
        loader: Loader,
        *,
        latents: EntrySource,
        texts: EntrySource,
        keys: SampleKeys,
        device: torch.device,
        mover: Mover | None = None,
        depth: int = 2,
        workers: int = 2,
        live: LiveEncoder | None = None,
        per_step: int | None = None,
        memory: UnifiedMemory | None = None,
        on_decision: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`workers` threads read entries that are not in memory and decode samples that are not cached.

        `depth` batches are prepared ahead at first; the look-ahead adapts this number, except 0.
        `per_step`: the number of batches per optimizer step, if it is constant. It serves to predict the batches of the
        next steps; a wrong number costs time but gives the same batches.
        `memory` includes waiting times in its statistics and reduces the look-ahead when memory is tight.
        `on_decision` receives a message when a cache moves between host and GPU because steps waited for data.
        """
        if mover is None:
            mover = RingMover(device) if device.type == "cuda" else InPlace(device)
        check_live(loader, keys, live or LiveEncoder())
        self._loader = loader
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="gracetune-batches")
        fetcher = _Fetcher(loader, latents, texts, keys, live or LiveEncoder(), self._pool)
        self._feed = _Feed(loader, fetcher, beyond=READ_BEYOND if depth else 0, per_step=per_step)
        if memory is None:
            self._ahead = LookAhead(self._feed, mover, depth=depth)
        else:
            self._ahead = memory.look_ahead(self._feed, mover, depth=depth)
        self._on_gpu = device.type == "cuda"
        self._memory = memory
        self._counted = _Counted()
        self._placement = _CachePlacement(memory, on_decision)

    def next(self, size: int | None = None, *, step: int = 0) -> Batch | EpochEnd | Exhausted:
        """The next outcome of the loader; see `Loader.next_batch`.

        Errors of a batch are raised when it would be returned, and the loader does not advance. After an
        UnreadableMediaError and `Loader.exclude`, the next call returns the rest of the batch. After an EntriesError
        and encoding the listed entries again, it returns the whole batch.
        """
        began = time.perf_counter()
        is_stale = self._feed.set_request(size, step)
        if is_stale or self._ahead.is_stuck:
            self._forget()
        coming = self._feed.peek(1)
        if not coming or not isinstance(coming[0], BatchRef):
            return self._no_batch(size, step)
        tensors = next(self._ahead)
        ref = self._loader.next_batch(size, step=step)
        assert isinstance(ref, BatchRef), "peek must agree with next_batch"
        self._feed.take_first(ref)
        counted = self._counted
        counted.batches += 1
        counted.samples += len(ref.samples)
        counted.host_ms += 1000 * (time.perf_counter() - began)
        if counted.batches % BATCHES_PER_CHECK == 0 or self._placement.must_go_back:
            self._placement.check(self._feed.fetcher, self._ahead)
        return Batch(ref, tensors)

    def _no_batch(self, size: int | None, step: int) -> EpochEnd | Exhausted:
        outcome = self._loader.next_batch(size, step=step)
        assert not isinstance(outcome, BatchRef), "peek must agree with next_batch"
        self._feed.skip_outcome()
        return outcome

    def _forget(self) -> None:
        self._counted.discarded += len(self._feed.started)
        self._ahead.discard()
        self._feed.forget()

    def use(self, *, latents: EntrySource | None = None, texts: EntrySource | None = None) -> None:
        """Replace stores, starting with the next batch. A run does this when an epoch's entries were refreshed.

        The old stores can be closed when this returns.
        """
        self._forget()
        fetcher = self._feed.fetcher
        if latents is not None:
            fetcher.latents = latents
            self._placement.forget("latents")
        if texts is not None:
            fetcher.texts = texts
            self._placement.forget("texts")

    def on_depth(self, report: OnDepth) -> None:
        """Register a callback for later changes of the look-ahead depth, with their reasons."""
        self._ahead.on_change = report

    @property
    def stats(self) -> SourceStats:
        self._ahead.catch_up()
        fetcher, ahead = self._feed.fetcher, self._ahead.stats
        return SourceStats(
            **vars(self._counted),
            live_samples=fetcher.live_samples,
            live_seconds=fetcher.live_seconds,
            wait_ms=ahead.wait_ms if self._on_gpu else 1000 * fetcher.waited_seconds,
            step_ms=ahead.step_ms,
        )

    def all_stats(self) -> dict[str, Any]:
        """Statistics as `cache.*`, plus torch's memory statistics and `uvm.*` if the unified-memory layer is open."""
        fetcher = self._feed.fetcher
        memory = {} if self._memory is None else self._memory.stats()
        return add_cache_stats(memory, self.stats, fetcher.latents.stats, fetcher.texts.stats)

    def close(self) -> None:
        self._forget()
        self._ahead.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> BatchSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _CachePlacement:
    """Moves managed caches between host and GPU: to the GPU when steps wait for data, back in memory stage 2.

    Moves are enqueued on a stream, so the host never waits for the GPU. Batches stay correct during a move.
    """

    def __init__(self, memory: UnifiedMemory | None, on_decision: Callable[[str], None]) -> None:
        self._memory, self._on_decision = memory, on_decision
        self._last_totals = (0.0, 0.0)
        """Total waiting and step time at the last check, in ms."""
        self._moved: set[str] = set()
        """Roles of the caches that were moved to the GPU because steps waited."""
        self._sent_back: set[str] = set()
        self._has_reported_waits = False

    @property
    def must_go_back(self) -> bool:
        return bool(self._moved) and self._memory is not None and self._memory.memory_is_tight

    def forget(self, role: str) -> None:
        """Forget the move of a role's cache, because another store replaced it."""
        self._moved.discard(role)

    def check(self, fetcher: _Fetcher, ahead: LookAhead) -> None:
        """Check the waiting time since the last check, and move caches if that helps. Small caches move first."""
        ahead.catch_up()
        totals = (ahead.stats.wait_ms, ahead.stats.step_ms)
        waits = StepWaits(totals[0] - self._last_totals[0], totals[1] - self._last_totals[1], ahead.is_deepest)
        self._last_totals = totals
        by_role = {"texts": fetcher.texts, "latents": fetcher.latents}
        stores = {role: one for role, one in by_role.items() if isinstance(one, ResidentStore)}
        by_size = sorted(stores.items(), key=lambda item: item[1].report.size)
        moved = [self._check_one(role, one, waits) for role, one in by_size]
        if waits.are_long and not any(moved) and not self._has_reported_waits:
            self._has_reported_waits = True
            why = _why_not_nearer([*stores.values()])
            self._on_decision(f"batches: {waits}, with the deepest look-ahead; no cache can move to the GPU: {why}")

    def _check_one(self, role: str, store: ResidentStore, waits: StepWaits) -> bool:
        """Move a cache if that helps. Returns whether a move has begun."""
        slab, memory = store.managed, self._memory
        if slab is None or memory is None:
            return False
        name, size = store.report.name, store.report.size
        # A cache that was placed on the GPU from the start is small and stays there.
        if slab.home == "device" and store.report.residence.kind == "managed_device":
            return False
        room = memory.device_room() if waits.are_long and slab.home == "host" else None
        decision = rehome(
            slab.home, waits, size=size, room=room, memory_tight=memory.memory_is_tight,
            was_sent_back=role in self._sent_back,
        )  # fmt: skip
        if decision is None:
            return False
        hint = slab.move(decision.home, memory.moving_stream())
        if decision.home == "device" and hint:
            self._moved.add(role)
        else:
            self._moved.discard(role)
            self._sent_back.add(role)
        location = "the GPU" if decision.home == "device" else "host memory"
        self._on_decision(
            f"{name}: moves to {location}: {decision.reason}" if hint else f"{name}: is not moved: {hint.reason}"
        )
        return bool(hint)


def _why_not_nearer(stores: list[ResidentStore]) -> str:
    if all(one.managed is None for one in stores):
        return "none is in managed memory (set cache type unified_memory and memory.enable_uvm_hints: true)"
    return "the managed caches are already there or do not fit into free GPU memory"


@dataclass
class _Counted:
    """Counters behind the fields of `SourceStats` with the same names."""

    batches: int = 0
    samples: int = 0
    discarded: int = 0
    host_ms: float = 0.0


class _Feed:
    """The iterator of predicted batches that the look-ahead consumes.

    Unlike other iterators it may continue after StopIteration, because the loader has advanced since.
    """

    def __init__(self, loader: Loader, fetcher: _Fetcher, *, beyond: int, per_step: int | None) -> None:
        self.fetcher = fetcher
        self._per_step, self._done = per_step, 0
        self.started: deque[BatchRef] = deque()
        """Batches passed to the look-ahead but not yet returned to the caller."""
        self._loader, self._beyond = loader, beyond
        self._request: tuple[int | None, int] = (None, 0)
        """Batch size and step that predictions are based on."""
        self._position = 0
        """How many of the loader's coming outcomes were consumed here."""
        self._fetching: dict[int, _Fetching] = {}
        """By id() of the reference. The value keeps the reference alive, so its id() is not reused."""

    def set_request(self, size: int | None, step: int) -> bool:
        """Base predictions on this request. Returns True if batches already started no longer match them."""
        if step != self._request[1]:
            self._done = 0
        self._request = (size, step)
        coming = [one for one in self.peek(self._position) if isinstance(one, BatchRef)]
        same = len(coming) == len(self.started) and all(a is b for a, b in zip(coming, self.started, strict=True))
        return not same

    def forget(self) -> None:
        self.started.clear()
        self._position = 0
        for fetching in self._fetching.values():
            fetching.cancel()
        self._fetching.clear()

    def take_first(self, ref: BatchRef) -> None:
        """Count the first of `started` as returned to the caller."""
        first = self.started.popleft()
        assert first is ref, "batches must be returned in the order they were started"
        self._position -= 1
        self._done += 1

    def skip_outcome(self) -> None:
        """Count an outcome of the loader that is not a batch."""
        self._position = max(0, self._position - 1)

    def __iter__(self) -> Iterator[dict[str, Stacked]]:
        return self

    def __next__(self) -> dict[str, Stacked]:
        ref = self._following()
        if ref is None:
            raise StopIteration
        self._fetch_beyond()
        fetching = self._fetching.pop(id(ref), None) or self.fetcher.start(ref)
        parts = self.fetcher.finish(fetching)
        self.started.append(ref)
        self._position += 1
        return parts

    def _following(self) -> BatchRef | None:
        while True:
            outcomes = self.peek(self._position + 1)
            if len(outcomes) <= self._position or isinstance(outcomes[-1], Exhausted):
                return None
            if isinstance(outcomes[-1], BatchRef):
                return outcomes[-1]
            self._position += 1  # continue past the end of an epoch: the next one's entries may already exist

    def _fetch_beyond(self) -> None:
        for one in self.peek(self._position + 1 + self._beyond)[self._position :]:
            if isinstance(one, BatchRef) and id(one) not in self._fetching:
                self._fetching[id(one)] = self.fetcher.start(one)

    def peek(self, count: int) -> tuple[BatchRef | EpochEnd | Exhausted, ...]:
        size, step = self._request
        if not count:
            return ()
        return self._loader.peek(count, size, step=step, per_step=self._per_step, done=self._done)


@dataclass(frozen=True, eq=False)
class _Fetching:
    """The entries of a batch while they are being fetched into main memory."""

    ref: BatchRef
    latents: tuple[Fetch, ...]
    texts: tuple[Fetch, ...]
    futures: tuple[Future[Any], ...]

    def cancel(self) -> None:
        for future in self.futures:
            future.cancel()


class _Fetcher:
    """Gets the entries of samples: from memory, from disk, or by encoding them now."""

    def __init__(
        self,
        loader: Loader,
        latents: EntrySource,
        texts: EntrySource,
        keys: SampleKeys,
        live: LiveEncoder,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.latents, self.texts = latents, texts
        self.live_samples, self.live_seconds, self.waited_seconds = 0, 0.0, 0.0
        self._keys, self._memo, self._live, self._pool = keys, _KeyMemo(keys), live, pool
        self._load = loader.index.load  # the loader never returns samples that it excludes later
        self._uncached = {one.id for one in loader.index.datasets if freshness(one.dataset) == "visit"}

    def start(self, ref: BatchRef) -> _Fetching:
        futures: list[Future[Any]] = []
        latents: list[Fetch] = []
        texts: list[Fetch] = []
        for sample in ref.samples:
            decoding = self._decoding(sample, futures)
            if decoding is None:
                latents.append(self._cached(self.latents, self._memo.of_latent(sample), futures))
            else:
                latents.append(partial(self._encode_latents, decoding))
            if decoding is not None and self._keys.reads_images and sample.conditioning:
                texts.append(partial(self._encode_text, decoding))
            else:
                texts.append(self._cached(self.texts, self._memo.of_text(sample), futures))
        return _Fetching(ref, tuple(latents), tuple(texts), tuple(futures))

    def _decoding(self, sample: SampleRef, futures: list[Future[Any]]) -> Future[Sample] | None:
        """Start decoding a sample; None if its latents are cached."""
        if sample.dataset not in self._uncached:
            return None
        futures.append(future := self._pool.submit(self._load, sample))
        return future

    def _cached(self, store: EntrySource, key: Key, futures: list[Future[Any]]) -> Fetch:
        entry = store.look_up(key)
        if entry is not None:
            return entry
        futures.append(future := self._pool.submit(store.read, key))
        return partial(self._wait, future)

    def finish(self, fetching: _Fetching) -> dict[str, Stacked]:
        entries = [
            self._keys.used(_joined(_result(latent, sample), _result(text, sample), sample.path), sample)
            for latent, text, sample in zip(fetching.latents, fetching.texts, fetching.ref.samples, strict=True)
        ]
        return collate(entries, [sample.path for sample in fetching.ref.samples])

    def _wait(self, future: Future[Any]) -> Any:
        began = time.perf_counter()
        result = future.result()
        self.waited_seconds += time.perf_counter() - began
        return result

    def _encode_latents(self, decoding: Future[Sample]) -> Mapping[str, Tensor]:
        sample: Sample = self._wait(decoding)
        assert self._live.latents is not None, "check_live has verified this"
        began = time.perf_counter()
        (entry,) = self._live.latents.encode([sample])  # one at a time, as the memory plan assumes
        self.live_samples += 1
        self.live_seconds += time.perf_counter() - began
        return entry

    def _encode_text(self, decoding: Future[Sample]) -> Mapping[str, Tensor]:
        sample: Sample = self._wait(decoding)
        assert self._live.texts is not None, "check_live has verified this"
        (entry,) = self._live.texts.encode([Prompt(sample.ref.caption.text, sample.conditioning)])
        return entry


def _result(fetch: Fetch, sample: SampleRef) -> Mapping[str, Tensor]:
    if not callable(fetch):
        return fetch
    try:
        return fetch()
    except (MissingEntryError, CorruptEntryError) as error:  # the store knows only keys: add the sample to the message
        raise type(error)(error.keys, error.folder, f"{sample.path} of {sample.dataset}") from error


def _joined(latent: Mapping[str, Tensor], text: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    if not latent.keys().isdisjoint(text.keys()):
        found = f"{min(latent.keys() & text.keys())} in both the latent entry and the text entry of {name}"
        hint = "please report this bug: the two encoders use the same name"
        raise UnlikeEntriesError(Problem("entries", found, "different tensor names", hint))
    return {**latent, **text}


def check_live(loader: Loader, keys: SampleKeys, live: LiveEncoder) -> None:
    """Check early that each dataset without a cache has an encoder, before the first of its samples is needed."""
    for one in loader.index.datasets:
        if freshness(one.dataset) != "visit":
            continue
        if live.latents is None:
            raise _not_cached(one.id, "latents", "a latent encoder")
        if live.texts is None and keys.reads_images and any(item.references for item in one.items):
            raise _not_cached(one.id, "text embeddings with reference images", "a text encoder")


def _not_cached(dataset: str, what: str, needed: str) -> CacheError:
    hint = "pass encoders to the batch source, or set augmentation.cache_mode: static and cache_latents: disk"
    found = "none are cached (cache_latents: none, or augmentation.cache_mode: disable_cache)"
    return CacheError(Problem(f"{what} of dataset {dataset}", found, needed, hint))
