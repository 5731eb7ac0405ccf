"""The source of batches: references from the loader, entries from the caches, tensors on the device.

    with BatchSource(loader, latents=latents, texts=texts, keys=keys, device=device, depth=2) as source:
        while not isinstance(outcome := source.next(size, step=step), Exhausted): ...

It looks at what the loader will bring, gathers the next batches while this one is used, and forgets those that do not
come after all (another size was asked for, a dataset ended). The loader moves only when a batch is handed out, so its
saved state never counts what was only foreseen. With `depth=0` nothing is done ahead; the batches are the same.
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
from gracetune.cache.stats import SourceStats, StoreStats, merged
from gracetune.data.index import freshness
from gracetune.data.loader import EpochEnd, Exhausted, Loader
from gracetune.data.media.load import Sample
from gracetune.data.refs import BatchRef, SampleRef
from gracetune.errors import Problem
from gracetune.memory.lookahead import InPlace, LookAhead, Mover, OnDepth, RingMover
from gracetune.memory.placement import Waits, rehome
from gracetune.memory.stacked import Stacked

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gracetune.memory.layer import UnifiedMemory

    Fetch = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]
    """The entry, or what waits for it."""

K = TypeVar("K")
V = TypeVar("V")

MOST_KNOWN = 1 << 15
"""About 1 KB each."""
JUDGED = 32
"""Batches between two looks at how long steps have waited."""
BEYOND = 2
"""Batches whose entries are read from disk or decoded before they are gathered, beyond those under way."""


class Entries(Protocol):
    """What a source of batches asks of a cache; `ResidentStore` is one."""

    @property
    def stats(self) -> StoreStats: ...

    def look_up(self, key: Key) -> Mapping[str, Tensor] | None:
        """At once, or None."""

    def read(self, key: Key) -> Mapping[str, Tensor]:
        """Called in a thread."""


@dataclass(frozen=True)
class Keys:
    """Which entries belong to a sample."""

    latent: EncoderId
    text: EncoderId
    reads_pictures: bool = False
    """The text encoder's: an embedding depends on the sample's references too."""
    per_use: PerUse | None = None
    """What takes the place of cached tensors."""

    def of_latent(self, ref: SampleRef) -> Key:
        return latent_key(ref, self.latent)

    def of_text(self, ref: SampleRef) -> Key:
        """A dropped caption is a text too (`captions.dropped_caption`), which is cached like any other."""
        return text_key(ref.caption.text, self.text, ref.conditioning if self.reads_pictures else ())

    def used(self, entry: Mapping[str, Tensor], ref: SampleRef) -> Mapping[str, Tensor]:
        """An entry as the sample is trained with it this time."""
        return entry if self.per_use is None else {**entry, **self.per_use(ref)}


class _Known:
    """Keys made before. An index brings the same reference whenever a sample looks the same."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._latent: dict[int, tuple[SampleRef, Key]] = {}
        """By the reference's identity; the value holds it, so that stays its own."""
        self._text: dict[tuple[str, tuple[SampleRef, ...]], Key] = {}

    def of_latent(self, ref: SampleRef) -> Key:
        found = self._latent.get(id(ref))
        if found is None:
            found = _bounded(self._latent)[id(ref)] = (ref, self._keys.of_latent(ref))
        return found[1]

    def of_text(self, ref: SampleRef) -> Key:
        known = (ref.caption.text, ref.conditioning)
        key = self._text.get(known)
        if key is None:
            key = _bounded(self._text)[known] = self._keys.of_text(ref)
        return key


def _bounded(known: dict[K, V]) -> dict[K, V]:
    if len(known) >= MOST_KNOWN:
        known.clear()
    return known


@dataclass(frozen=True)
class Live:
    """What encodes samples whose entries are not cached, because they look different at every visit."""

    latents: LatentEncoder | None = None
    texts: TextEncoder | None = None
    """Only asked where embeddings depend on such pictures."""


@dataclass(frozen=True, eq=False)
class Batch:
    """What a step works on; good until the next is asked for."""

    ref: BatchRef
    tensors: Mapping[str, Tensor]
    """With a first dimension for the samples, on the device; names as in `cache.encoder`. For reading: where batches
    are read in place, the tensors of a single sample are the cache's own."""


class BatchSource:
    """One rank's batches. Only the training step consumes it."""

    def __init__(
        self,
        loader: Loader,
        *,
        latents: Entries,
        texts: Entries,
        keys: Keys,
        device: torch.device,
        mover: Mover | None = None,
        depth: int = 2,
        workers: int = 2,
        live: Live | None = None,
        per_step: int | None = None,
        memory: UnifiedMemory | None = None,
        on_decision: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`workers` threads read what is not in memory and decode what is not cached.

        `per_step`: batches of an optimizer step, where that stays the same: what comes in the next steps is foreseen by
        it. A wrong number costs time, nothing else.
        `memory` counts waiting in its statistics and makes the look-ahead shallower when memory is tight.
        `on_decision` hears in words when a cache gets another home because of how long steps waited, and why.
        """
        if mover is None:
            mover = RingMover(device) if device.type == "cuda" else InPlace(device)
        check_live(loader, keys, live or Live())
        self._loader = loader
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="gracetune-batches")
        fetcher = _Fetcher(loader, latents, texts, keys, live or Live(), self._pool)
        self._feed = _Feed(loader, fetcher, beyond=BEYOND if depth else 0, per_step=per_step)
        if memory is None:
            self._ahead = LookAhead(self._feed, mover, depth=depth)
        else:
            self._ahead = memory.look_ahead(self._feed, mover, depth=depth)
        self._on_gpu = device.type == "cuda"
        self._memory = memory
        self._counted = _Counted()
        self._homes = _Homes(memory, on_decision)

    def next(self, size: int | None = None, *, step: int = 0) -> Batch | EpochEnd | Exhausted:
        """As `Loader.next_batch`. What cannot be had raises when its turn comes; then the loader has not moved.

        UnreadableMediaError: after `Loader.exclude` the rest of the batch comes with the next call. EntriesError: once
        the named entries were made again, so does the whole.
        """
        began = time.perf_counter()
        forgotten = self._feed.ask(size, step)
        if forgotten or self._ahead.is_stuck:
            self._forget()
        coming = self._feed.peek(1)
        if not coming or not isinstance(coming[0], BatchRef):
            return self._no_batch(size, step)
        tensors = next(self._ahead)
        ref = self._loader.next_batch(size, step=step)
        assert isinstance(ref, BatchRef), "what was peeked at comes next"
        self._feed.hand_out(ref)
        counted = self._counted
        counted.batches += 1
        counted.samples += len(ref.samples)
        counted.host_ms += 1000 * (time.perf_counter() - began)
        if counted.batches % JUDGED == 0 or self._homes.must_go_back:
            self._homes.judge(self._feed.fetcher, self._ahead)
        return Batch(ref, tensors)

    def _no_batch(self, size: int | None, step: int) -> EpochEnd | Exhausted:
        outcome = self._loader.next_batch(size, step=step)
        assert not isinstance(outcome, BatchRef), "what was peeked at comes next"
        self._feed.pass_by()
        return outcome

    def _forget(self) -> None:
        self._counted.discarded += len(self._feed.started)
        self._ahead.discard()
        self._feed.forget()

    def use(self, *, latents: Entries | None = None, texts: Entries | None = None) -> None:
        """Read other stores from the next batch on: at the end of an epoch whose entries are made anew.

        The old ones can be closed when this returns.
        """
        self._forget()
        fetcher = self._feed.fetcher
        if latents is not None:
            fetcher.latents = latents
            self._homes.forget("latents")
        if texts is not None:
            fetcher.texts = texts
            self._homes.forget("texts")

    def on_depth(self, report: OnDepth) -> None:
        """`report` gets every later change of how many batches are kept under way, and why."""
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
        """torch's memory statistics where the unified-memory layer is open, `uvm.*` and `cache.*` added."""
        fetcher = self._feed.fetcher
        memory = {} if self._memory is None else self._memory.stats()
        return merged(memory, self.stats, fetcher.latents.stats, fetcher.texts.stats)

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


class _Homes:
    """Gives managed caches another home when steps wait for them, or when memory becomes tight. The host never waits
    for the GPU here: a move is only enqueued, and batches are right while it is under way."""

    def __init__(self, memory: UnifiedMemory | None, on_decision: Callable[[str], None]) -> None:
        self._memory, self._on_decision = memory, on_decision
        self._seen = (0.0, 0.0)
        self._moved: set[str] = set()
        """Caches that went to the GPU because steps waited."""
        self._sent_back: set[str] = set()
        self._waits_said = False

    @property
    def must_go_back(self) -> bool:
        return bool(self._moved) and self._memory is not None and self._memory.memory_is_tight

    def forget(self, role: str) -> None:
        """Another store has this role from now on, with a home of its own."""
        self._moved.discard(role)

    def judge(self, fetcher: _Fetcher, ahead: LookAhead) -> None:
        ahead.catch_up()
        now = (ahead.stats.wait_ms, ahead.stats.step_ms)
        waits = Waits(now[0] - self._seen[0], now[1] - self._seen[1], ahead.is_deepest)
        self._seen = now
        given = {"texts": fetcher.texts, "latents": fetcher.latents}
        stores = {role: one for role, one in given.items() if isinstance(one, ResidentStore)}
        by_size = sorted(stores.items(), key=lambda found: found[1].report.size)
        moved = [self._judge_one(role, one, waits) for role, one in by_size]
        if waits.are_long and not any(moved) and not self._waits_said:
            self._waits_said = True
            why = _why_not_nearer([*stores.values()])
            self._on_decision(f"batches: {waits}, with the deepest look-ahead; no cache can move to the GPU: {why}")

    def _judge_one(self, role: str, store: ResidentStore, waits: Waits) -> bool:
        slab, memory = store.managed, self._memory
        if slab is None or memory is None:
            return False
        name, size = store.report.name, store.report.size
        # A cache whose home was the GPU from the start is small: it stays there.
        if slab.home == "device" and store.report.residence.place == "managed_device":
            return False
        room = memory.device_room() if waits.are_long and slab.home == "host" else None
        told = rehome(
            slab.home, waits, size=size, room=room, memory_tight=memory.memory_is_tight,
            was_sent_back=role in self._sent_back,
        )  # fmt: skip
        if told is None:
            return False
        hint = slab.move(told.home, memory.moving_stream())
        if told.home == "device" and hint:
            self._moved.add(role)
        else:
            self._moved.discard(role)
            self._sent_back.add(role)
        where = "the GPU" if told.home == "device" else "host memory"
        self._on_decision(
            f"{name}: moves to {where}: {told.reason}" if hint else f"{name}: stays where it is: {hint.reason}"
        )
        return bool(hint)


def _why_not_nearer(stores: list[ResidentStore]) -> str:
    if all(one.managed is None for one in stores):
        return "none is managed memory (cache type unified_memory, memory.enable_uvm_hints: true)"
    return "the managed caches do not fit into free GPU memory, or are there already"


@dataclass
class _Counted:
    """What `SourceStats` calls the same."""

    batches: int = 0
    samples: int = 0
    discarded: int = 0
    host_ms: float = 0.0


class _Feed:
    """What the look-ahead takes batches from: those the loader will bring, as far as anybody knows now.

    Unlike other iterators it may go on after it had nothing to give: the loader has moved meanwhile.
    """

    def __init__(self, loader: Loader, fetcher: _Fetcher, *, beyond: int, per_step: int | None) -> None:
        self.fetcher = fetcher
        self._per_step, self._done = per_step, 0
        self.started: deque[BatchRef] = deque()
        """Given to the look-ahead and not handed out."""
        self._loader, self._beyond = loader, beyond
        self._asked: tuple[int | None, int] = (None, 0)
        self._position = 0
        """In the loader's outcomes from now on: the first not looked at."""
        self._fetching: dict[int, _Fetching] = {}
        """By the reference's identity; the value holds it, so that stays its own."""

    def ask(self, size: int | None, step: int) -> bool:
        """Foresee by this from now on; True where that makes what was started wrong."""
        if step != self._asked[1]:
            self._done = 0
        self._asked = (size, step)
        coming = [one for one in self.peek(self._position) if isinstance(one, BatchRef)]
        same = len(coming) == len(self.started) and all(a is b for a, b in zip(coming, self.started, strict=True))
        return not same

    def forget(self) -> None:
        self.started.clear()
        self._position = 0
        for fetching in self._fetching.values():
            fetching.cancel()
        self._fetching.clear()

    def hand_out(self, ref: BatchRef) -> None:
        first = self.started.popleft()
        assert first is ref, "batches are handed out in the order they were started"
        self._position -= 1
        self._done += 1

    def pass_by(self) -> None:
        """The loader brought something that is no batch."""
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
            self._position += 1  # the end of an epoch: the next one's entries may be there already

    def _fetch_beyond(self) -> None:
        for one in self.peek(self._position + 1 + self._beyond)[self._position :]:
            if isinstance(one, BatchRef) and id(one) not in self._fetching:
                self._fetching[id(one)] = self.fetcher.start(one)

    def peek(self, count: int) -> tuple[BatchRef | EpochEnd | Exhausted, ...]:
        size, step = self._asked
        if not count:
            return ()
        return self._loader.peek(count, size, step=step, per_step=self._per_step, done=self._done)


@dataclass(frozen=True, eq=False)
class _Fetching:
    """The entries of a batch, on their way to main memory or there."""

    ref: BatchRef
    latents: tuple[Fetch, ...]
    texts: tuple[Fetch, ...]
    futures: tuple[Future[Any], ...]

    def cancel(self) -> None:
        for future in self.futures:
            future.cancel()


class _Fetcher:
    """Finds the entries of samples: in memory, on disk, or made on the spot."""

    def __init__(
        self, loader: Loader, latents: Entries, texts: Entries, keys: Keys, live: Live, pool: ThreadPoolExecutor
    ) -> None:
        self.latents, self.texts = latents, texts
        self.live_samples, self.live_seconds, self.waited_seconds = 0, 0.0, 0.0
        self._keys, self._known, self._live, self._pool = keys, _Known(keys), live, pool
        self._load = loader.index.load  # what is excluded later is not asked for
        self._uncached = {one.id for one in loader.index.datasets if freshness(one.dataset) == "visit"}

    def start(self, ref: BatchRef) -> _Fetching:
        futures: list[Future[Any]] = []
        latents: list[Fetch] = []
        texts: list[Fetch] = []
        for sample in ref.samples:
            decoding = self._decoding(sample, futures)
            if decoding is None:
                latents.append(self._cached(self.latents, self._known.of_latent(sample), futures))
            else:
                latents.append(partial(self._encode_latents, decoding))
            if decoding is not None and self._keys.reads_pictures and sample.conditioning:
                texts.append(partial(self._encode_text, decoding))
            else:
                texts.append(self._cached(self.texts, self._known.of_text(sample), futures))
        return _Fetching(ref, tuple(latents), tuple(texts), tuple(futures))

    def _decoding(self, sample: SampleRef, futures: list[Future[Any]]) -> Future[Sample] | None:
        """None where the sample's latents are cached."""
        if sample.dataset not in self._uncached:
            return None
        futures.append(future := self._pool.submit(self._load, sample))
        return future

    def _cached(self, store: Entries, key: Key, futures: list[Future[Any]]) -> Fetch:
        entry = store.look_up(key)
        if entry is not None:
            return entry
        futures.append(future := self._pool.submit(store.read, key))
        return partial(self._wait, future)

    def finish(self, fetching: _Fetching) -> dict[str, Stacked]:
        entries = [
            self._keys.used(_joined(_had(latent, sample), _had(text, sample), sample.path), sample)
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
        assert self._live.latents is not None, "checked when the source was made"
        began = time.perf_counter()
        (entry,) = self._live.latents.encode([sample])  # one at a time, as the memory plan has it
        self.live_samples += 1
        self.live_seconds += time.perf_counter() - began
        return entry

    def _encode_text(self, decoding: Future[Sample]) -> Mapping[str, Tensor]:
        sample: Sample = self._wait(decoding)
        assert self._live.texts is not None, "checked when the source was made"
        (entry,) = self._live.texts.encode([Prompt(sample.ref.caption.text, sample.conditioning)])
        return entry


def _had(fetch: Fetch, sample: SampleRef) -> Mapping[str, Tensor]:
    if not callable(fetch):
        return fetch
    try:
        return fetch()
    except (MissingEntryError, CorruptEntryError) as error:  # the store knows keys only
        raise type(error)(error.keys, error.folder, f"{sample.path} of {sample.dataset}") from error


def _joined(latent: Mapping[str, Tensor], text: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    if not latent.keys().isdisjoint(text.keys()):
        found = f"{min(latent.keys() & text.keys())} in the latent entry and in the text entry of {name}"
        hint = "please report it: these encoders do not belong together"
        raise UnlikeEntriesError(Problem("entries", found, "one tensor of each name", hint))
    return {**latent, **text}


def check_live(loader: Loader, keys: Keys, live: Live) -> None:
    """In the first minute, not at the first such sample: what is not cached needs somebody to encode it."""
    for one in loader.index.datasets:
        if freshness(one.dataset) != "visit":
            continue
        if live.latents is None:
            raise _not_cached(one.id, "latents", "an encoder for its latents")
        if live.texts is None and keys.reads_pictures and any(item.references for item in one.items):
            raise _not_cached(one.id, "text embeddings of its pictures", "an encoder for its texts")


def _not_cached(dataset: str, what: str, needed: str) -> CacheError:
    hint = "give the source of batches its encoders, or set augmentation.cache_mode: static and cache_latents: disk"
    found = "none are cached (cache_latents: none, or augmentation.cache_mode: disable_cache)"
    return CacheError(Problem(f"{what} of dataset {dataset}", found, needed, hint))
