"""The machinery of an encode pass, whatever is encoded: claims, decoding ahead, smaller batches, writing, counting."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from gracetune.cache.claims import Claims
from gracetune.cache.errors import CacheError, unreadable
from gracetune.cache.keys import Key
from gracetune.cache.store import DiskStore
from gracetune.cache.wanted import CacheItem, by_folder
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.index import DataIndex, Exclusions
from gracetune.errors import Problem
from gracetune.units import GIB

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry
    from gracetune.cache.writer import Flush, Writer

Decoded = TypeVar("Decoded")

AHEAD_BYTES = GIB
"""Decoded samples that wait; one batch may wait however large it is."""
AHEAD_BATCHES = 2
"""Beyond the one that is encoded. What is claimed early is not left to a faster rank."""
_FIRST_NAP, _LONGEST_NAP = 0.02, 0.5


@dataclass(frozen=True)
class Share:
    """Which process of those that carry out a pass together; each begins somewhere else."""

    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class Progress:
    done: int
    """Of those that were missing: made here or elsewhere, or found to be damaged."""
    total: int
    per_second: float | None
    seconds_left: float | None
    """None until something is done."""


@dataclass(frozen=True)
class Damaged:
    dataset: str
    path: str
    reason: str


@dataclass
class Tally:
    """What a pass has done so far, over all its attempts."""

    encoded: int = 0
    encoded_bytes: int = 0
    by_others: int = 0
    there_before: int = 0
    largest: int = 0
    smallest: int = 0
    seconds: float = 0.0
    damaged: dict[tuple[str, str], Damaged] = field(default_factory=dict)

    def batch(self, limit: int) -> None:
        """`limit` is what a batch may hold; the last of a shape is smaller without saying anything."""
        self.largest = max(self.largest, limit)
        self.smallest = min(self.smallest or limit, limit)


class Work(Generic[CacheItem, Decoded]):
    """One pass over the items that are missing."""

    def __init__(
        self,
        items: Sequence[CacheItem],
        store_of: Callable[[Path], DiskStore],
        index: DataIndex,
        tally: Tally,
        *,
        decode: Callable[[DataIndex, CacheItem], Decoded],
        encode: Callable[[list[Decoded]], list[Entry]],
        relieve: Callable[[CacheItem], None],
        batch_size: int,
        limits: list[tuple[int, int]],
        workers: int,
        share: Share,
        flush: Flush,
        on_progress: Callable[[Progress], None],
        stop: threading.Event,
        lengths: Callable[[Sequence[CacheItem]], Sequence[int]] = lambda items: [0] * len(items),
    ) -> None:
        """`relieve` is asked when a single item does not fit: it frees memory, or raises.

        `limits` are pairs of volume and batch size: from that volume on, batches hold no more. Items of one of
        `lengths` come one after the other.
        """
        self._index, self.tally = index, tally
        self._excluded = Exclusions(index)
        self._decode, self._encode, self._relieve = decode, encode, relieve
        self._batch_size, self._limits, self._workers = batch_size, limits, workers
        self._flush, self._on_progress, self._stop = flush, on_progress, stop
        self._places = {folder: _Place(store_of(folder)) for folder in by_folder(items)}
        missing = [item for folder, some in by_folder(items).items() for item in self._places[folder].missing(some)]
        # The largest first: what does not fit into memory shows itself in the first minute.
        long = dict(zip((item.key for item in missing), lengths(missing), strict=True))
        missing.sort(key=lambda item: (-item.volume, str(item.folder), item.shape, -long[item.key], item.key))
        first = len(missing) * share.rank // share.world_size
        self._missing = [*missing[first:], *missing[:first]]
        self._total = len(missing)
        tally.there_before = len(items) - len(missing)
        self._volume = sum(item.volume for item in missing)
        self._done = self._done_volume = 0
        self._checked_room = False
        self._began = time.monotonic()

    @property
    def index(self) -> DataIndex:
        """Without the files that turned out to be damaged."""
        return self._excluded.apply()

    def run(self) -> bool:
        """Until everything is there; False where it was stopped before."""
        if not self._missing:
            return True
        try:
            with ExitStack() as stack:
                pool = ThreadPoolExecutor(self._workers, thread_name_prefix="gracetune-encode")
                stack.callback(pool.shutdown, wait=True, cancel_futures=True)
                for place in self._places.values():
                    place.enter(stack, self._flush)
                return self._carry_out(pool)
        finally:
            self.tally.seconds += time.monotonic() - self._began

    def _carry_out(self, pool: ThreadPoolExecutor) -> bool:
        waiting: deque[_Batch[CacheItem, Decoded]] = deque()
        for items in self._claimed():
            if items:
                waiting.append(_Batch(items, [self._decoding(pool, item) for item in items]))
            while waiting and (not items or _is_enough(waiting)):
                if self._stop.is_set():
                    return False
                self._finish(waiting.popleft())
            if not items:
                for place in self._places.values():
                    place.flush()
        return not self._stop.is_set()

    def _decoding(self, pool: ThreadPoolExecutor, item: CacheItem) -> Future[Decoded]:
        if item.decoded_bytes:
            return pool.submit(self._decode, self._index, item)
        ready: Future[Decoded] = Future()  # a text: waking a thread up would take longer than there is to do
        ready.set_result(self._decode(self._index, item))
        return ready

    # -- who does what

    def _claimed(self) -> Iterator[list[CacheItem]]:
        """Batches that are ours; an empty one when the rest is other processes', before that is waited for."""
        todo = deque(self._missing)
        nap = _FIRST_NAP
        while True:
            elsewhere: list[CacheItem] = []
            worked = False
            while todo:
                items = self._claim_batch(todo, elsewhere)
                worked = worked or bool(items)
                if items:
                    yield items
            yield []
            todo = deque(self._still_missing(elsewhere))
            if not todo or self._stop.is_set():
                return
            nap = _FIRST_NAP if worked else min(2 * nap, _LONGEST_NAP)
            self._stop.wait(nap)

    def _claim_batch(self, todo: deque[CacheItem], elsewhere: list[CacheItem]) -> list[CacheItem]:
        """Up to a batch of one shape from the beginning of `todo`; what others work on goes to `elsewhere`."""
        place, shape = self._places[todo[0].folder], todo[0].shape
        size = self._size_for(todo[0])
        taken: list[CacheItem] = []
        while todo and len(taken) < size and (todo[0].folder, todo[0].shape) == (place.folder, shape):
            item = todo.popleft()
            (taken if place.claims.take(item.key) else elsewhere).append(item)
        # Only now: what another process made and let go of before we claimed it has to be seen.
        place.look()
        mine = place.missing(taken)
        if len(mine) < len(taken):
            place.claims.release({item.key for item in taken} - {item.key for item in mine})
            self._made_elsewhere([item for item in taken if item not in mine])
        return mine

    def _still_missing(self, items: list[CacheItem]) -> list[CacheItem]:
        if not items:
            return []
        for place in self._places.values():
            place.look()
        missing = {item.key for folder, some in by_folder(items).items() for item in self._places[folder].missing(some)}
        self._made_elsewhere([item for item in items if item.key not in missing])
        return [item for item in items if item.key in missing]

    def _made_elsewhere(self, items: list[CacheItem]) -> None:
        self.tally.by_others += len(items)
        self._count(items)

    # -- doing it

    def _finish(self, batch: _Batch[CacheItem, Decoded]) -> None:
        items: list[CacheItem] = []
        decoded: list[Decoded] = []
        for item, future in zip(batch.items, batch.futures, strict=True):
            try:
                decoded.append(future.result())
                items.append(item)
            except UnreadableMediaError as error:
                self._exclude(item, error)
        while items:
            count = min(len(items), self._size_for(items[0]))
            entries = self._try(decoded[:count])
            if entries is None:
                self._shrink(items[0], count)
                continue
            self.tally.batch(self._size_for(items[0]))
            self._keep(items[:count], entries)
            del items[:count], decoded[:count]

    def _try(self, decoded: list[Decoded]) -> list[Entry] | None:
        """None where memory does not suffice. When this returns, nothing holds what the attempt had allocated."""
        import torch

        try:
            return self._encode(decoded)
        except (torch.OutOfMemoryError, MemoryError):
            return None

    def _shrink(self, item: CacheItem, failed: int) -> None:
        import torch

        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        self.tally.largest = max(self.tally.largest, failed)
        if failed > 1:
            self._limits.append((item.volume, failed // 2))
        else:
            self._limits.append((item.volume, 1))
            self._relieve(item)

    def _size_for(self, item: CacheItem) -> int:
        return min([self._batch_size, *(size for volume, size in self._limits if volume <= item.volume)])

    def _keep(self, items: list[CacheItem], entries: list[Entry]) -> None:
        for item, entry in zip(items, entries, strict=True):
            _check_finite(item.what, entry)
            self._places[item.folder].add(item, entry)
            self.tally.encoded += 1
            self.tally.encoded_bytes += _size(entry)
        self._count(items)
        if not self._checked_room:
            self._check_room(items, entries)
        self._places[items[0].folder].release_written()

    def _check_room(self, items: list[CacheItem], entries: list[Entry]) -> None:
        """As soon as it is known how large entries are, and long before the disk is full."""
        self._checked_room = True
        per_volume = sum(_size(entry) for entry in entries) / sum(item.volume for item in items)
        done = {item.key for item in items}
        for folder, rest in by_folder(self._missing).items():
            volume = sum(item.volume for item in rest if item.key not in done)
            self._places[folder].store.check_room(int(volume * per_volume))

    def _exclude(self, item: CacheItem, error: UnreadableMediaError) -> None:
        dataset = error.dataset or ""
        self.tally.damaged[dataset, error.path] = Damaged(dataset, error.path, error.reason)
        self._excluded.add(dataset, error.path, error.reason)
        self._places[item.folder].claims.release([item.key])
        self._count([item])

    def _count(self, items: list[CacheItem]) -> None:
        self._done += len(items)
        self._done_volume += sum(item.volume for item in items)
        spent = time.monotonic() - self._began
        rate = self._done / spent if self._done and spent else None
        left = spent * (self._volume / self._done_volume - 1) if self._done_volume else None
        self._on_progress(Progress(self._done, self._total, rate, left))


class _Place:
    """One store, while a pass adds to it."""

    claims: Claims
    writer: Writer

    def __init__(self, store: DiskStore) -> None:
        self.store, self.folder = store, store.folder
        self._unwritten: deque[Key] = deque()
        """Added and claimed, in that order, and perhaps not on disk yet."""
        self._seen: int | None = None
        store.refresh()

    def enter(self, stack: ExitStack, flush: Flush) -> None:
        # In this order: the writer's last flush comes before the claims end.
        self.claims = stack.enter_context(Claims(self.store))
        self.writer = stack.enter_context(self.store.writer(flush))

    def missing(self, items: Sequence[CacheItem]) -> list[CacheItem]:
        missing = {*self.store.find([item.key for item in items]).missing}
        return [item for item in items if item.key in missing]

    def look(self) -> None:
        """Learn what others have written, where anybody has."""
        try:
            now = self.store.shards_folder.stat().st_mtime_ns  # compared for equality: it may be any number
        except OSError as error:
            raise unreadable(error, self.folder) from error
        if now != self._seen:
            self.store.refresh()
            self._seen = now

    def add(self, item: CacheItem, entry: Entry) -> None:
        self.writer.add(item.origin, entry, key=item.key)
        self._unwritten.append(item.key)

    def flush(self) -> None:
        self.writer.flush()
        self.release_written()

    def release_written(self) -> None:
        """Let go of what the writer has flushed, now that others can find it."""
        while self._unwritten and self._unwritten[0] in self.store:
            self.claims.release([self._unwritten.popleft()])


@dataclass(frozen=True)
class _Batch(Generic[CacheItem, Decoded]):
    items: list[CacheItem]
    futures: list[Future[Decoded]]


def _is_enough(waiting: deque[_Batch[CacheItem, Decoded]]) -> bool:
    """Whether what is decoded or being decoded beyond the first batch suffices."""
    size = sum(item.decoded_bytes for batch in waiting for item in batch.items)
    return len(waiting) > AHEAD_BATCHES or (len(waiting) > 1 and size > AHEAD_BYTES)


def _size(entry: Entry) -> int:
    return sum(tensor.nbytes for tensor in entry.values())


def _check_finite(what: str, entry: Entry) -> None:
    """A cache would hand such numbers out for as long as it lives."""
    for name, tensor in entry.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        ends = tensor.aminmax()  # both are nan where any number is
        if not (math.isfinite(ends.min) and math.isfinite(ends.max)):
            hint = "take a VAE or text encoder that works in that precision, or training.mixed_precision: bf16"
            raise CacheError(Problem(f"{name} of {what}", "infinite or undefined numbers", "finite numbers", hint))
