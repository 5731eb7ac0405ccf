"""The core of an encode pass, for latents and texts: claims, decoding ahead, batch sizes, writing, progress."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from gracetune.cache.errors import CacheError, unreadable, unwritable
from gracetune.cache.keys import Key
from gracetune.cache.required_entries import CacheItem, by_folder
from gracetune.cache.store import DiskStore
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.index import DataIndex, Exclusions
from gracetune.errors import Problem
from gracetune.storage.locks import lock_byte, open_lock_file, unlock_byte
from gracetune.units import GIB

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry
    from gracetune.cache.writer import Flush, Writer

Decoded = TypeVar("Decoded")

AHEAD_BYTES = GIB
"""Limit for decoded samples in the queue. One batch may exceed it."""
AHEAD_BATCHES = 2
"""Batches to decode ahead. Few, because a batch is claimed before it is decoded and a faster rank cannot take it."""
_FIRST_NAP, _LONGEST_NAP = 0.02, 0.5


@dataclass(frozen=True)
class Share:
    """The position of this process among those that carry out a pass together. Each starts at another item."""

    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class PassProgress:
    """The progress of a pass."""

    done: int
    """Missing items that were encoded here or by others, or found to be damaged."""
    total: int
    per_second: float | None
    """Items per second."""
    seconds_left: float | None
    """Both are None until an item is done."""


@dataclass(frozen=True)
class DamagedItem:
    """A media file that cannot be decoded."""

    dataset: str
    path: str
    reason: str


@dataclass
class PassCounts:
    """The counters of a pass. A switch to tiling starts over with the same counters, except `found_before`."""

    encoded: int = 0
    encoded_bytes: int = 0
    by_others: int = 0
    found_before: int = 0
    largest: int = 0
    """The largest batch size that was tried."""
    smallest: int = 0
    """The smallest batch size that was used."""
    seconds: float = 0.0
    damaged: dict[tuple[str, str], DamagedItem] = field(default_factory=dict)

    def batch(self, limit: int) -> None:
        """Count a batch by its allowed size. The actual size says nothing: the last batch of a shape is smaller."""
        self.largest = max(self.largest, limit)
        self.smallest = min(self.smallest or limit, limit)


class PassWorker(Generic[CacheItem, Decoded]):
    """One pass over the missing items."""

    def __init__(
        self,
        items: Sequence[CacheItem],
        store_of: Callable[[Path], DiskStore],
        index: DataIndex,
        tally: PassCounts,
        *,
        decode: Callable[[DataIndex, CacheItem], Decoded],
        encode: Callable[[list[Decoded]], list[Entry]],
        save_memory: Callable[[CacheItem], None],
        batch_size: int,
        limits: list[tuple[int, int]],
        workers: int,
        share: Share,
        flush: Flush,
        on_progress: Callable[[PassProgress], None],
        stop: threading.Event,
        lengths: Callable[[Sequence[CacheItem]], Sequence[int]] = lambda items: [0] * len(items),
    ) -> None:
        """`save_memory` is called when a single item does not fit into memory. It frees memory or raises.

        `limits` contains pairs of volume and batch size: items of at least that volume use at most that batch size.
        `lengths` returns a sort key, which groups texts of the same length.
        """
        self._index, self.tally = index, tally
        self._excluded = Exclusions(index)
        self._decode, self._encode, self._save_memory = decode, encode, save_memory
        self._batch_size, self._limits, self._workers = batch_size, limits, workers
        self._flush, self._on_progress, self._stop = flush, on_progress, stop
        self._targets = {folder: _Target(store_of(folder)) for folder in by_folder(items)}
        missing = [item for folder, some in by_folder(items).items() for item in self._targets[folder].missing(some)]
        # The largest items come first, so that running out of memory happens in the first minute.
        length_of = dict(zip((item.key for item in missing), lengths(missing), strict=True))
        missing.sort(key=lambda item: (-item.volume, str(item.folder), item.shape, -length_of[item.key], item.key))
        first = len(missing) * share.rank // share.world_size
        self._missing = [*missing[first:], *missing[:first]]
        self._total = len(missing)
        tally.found_before = len(items) - len(missing)
        self._volume = sum(item.volume for item in missing)
        self._done = self._done_volume = 0
        self._checked_room = False
        self._began = time.monotonic()

    @property
    def index(self) -> DataIndex:
        """The index without files that turned out to be damaged."""
        return self._excluded.apply()

    def run(self) -> bool:
        """Work until all items exist. Returns False if the pass was stopped earlier."""
        if not self._missing:
            return True
        try:
            with ExitStack() as stack:
                pool = ThreadPoolExecutor(self._workers, thread_name_prefix="gracetune-encode")
                stack.callback(pool.shutdown, wait=True, cancel_futures=True)
                for target in self._targets.values():
                    target.enter(stack, self._flush)
                return self._carry_out(pool)
        finally:
            self.tally.seconds += time.monotonic() - self._began

    def _carry_out(self, pool: ThreadPoolExecutor) -> bool:
        """Claim, decode and encode until all items exist. Returns False if the pass was stopped."""
        queue: deque[_Batch[CacheItem, Decoded]] = deque()
        for items in self._claimed():
            if items:
                queue.append(_Batch(items, [self._decoding(pool, item) for item in items]))
            while queue and (not items or _is_enough(queue)):
                if self._stop.is_set():
                    return False
                self._finish(queue.popleft())
            if not items:
                for target in self._targets.values():
                    target.flush()
        return not self._stop.is_set()

    def _decoding(self, pool: ThreadPoolExecutor, item: CacheItem) -> Future[Decoded]:
        if item.decoded_bytes:
            return pool.submit(self._decode, self._index, item)
        ready: Future[Decoded] = Future()  # a plain text: waking a thread would take longer than the work itself
        ready.set_result(self._decode(self._index, item))
        return ready

    # -- claiming

    def _claimed(self) -> Iterator[list[CacheItem]]:
        """Batches that this process claimed.

        Yields an empty list when other processes hold all remaining items: the caller then finishes and flushes its own
        work before this generator waits for theirs. Without that flush two processes could wait for each other.
        """
        todo = deque(self._missing)
        nap = _FIRST_NAP
        while True:
            others: list[CacheItem] = []
            has_worked = False
            while todo:
                items = self._claim_batch(todo, others)
                has_worked = has_worked or bool(items)
                if items:
                    yield items
            yield []
            todo = deque(self._still_missing(others))
            if not todo or self._stop.is_set():
                return
            nap = _FIRST_NAP if has_worked else min(2 * nap, _LONGEST_NAP)
            self._stop.wait(nap)

    def _claim_batch(self, todo: deque[CacheItem], others: list[CacheItem]) -> list[CacheItem]:
        """Claim up to one batch of one shape from the start of `todo`. Items held by others are added to `others`."""
        target, shape = self._targets[todo[0].folder], todo[0].shape
        size = self._size_for(todo[0])
        claimed: list[CacheItem] = []
        while todo and len(claimed) < size and (todo[0].folder, todo[0].shape) == (target.folder, shape):
            item = todo.popleft()
            (claimed if target.claims.take(item.key) else others).append(item)
        # Refresh after claiming: another process may have written an item and released it just before our claim.
        target.refresh_if_changed()
        mine = target.missing(claimed)
        if len(mine) < len(claimed):
            target.claims.release({item.key for item in claimed} - {item.key for item in mine})
            self._count_others([item for item in claimed if item not in mine])
        return mine

    def _still_missing(self, items: list[CacheItem]) -> list[CacheItem]:
        if not items:
            return []
        for target in self._targets.values():
            target.refresh_if_changed()
        missing = {
            item.key for folder, some in by_folder(items).items() for item in self._targets[folder].missing(some)
        }
        self._count_others([item for item in items if item.key not in missing])
        return [item for item in items if item.key in missing]

    def _count_others(self, items: list[CacheItem]) -> None:
        self.tally.by_others += len(items)
        self._count(items)

    # -- encoding

    def _finish(self, batch: _Batch[CacheItem, Decoded]) -> None:
        """Encode a batch, in smaller parts if memory runs out, and add the entries to their stores."""
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
        """Encode, or return None if memory runs out.

        A separate method, so that after a failure no frame or traceback keeps the allocated tensors alive.
        """
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
            self._save_memory(item)

    def _size_for(self, item: CacheItem) -> int:
        return min([self._batch_size, *(size for volume, size in self._limits if volume <= item.volume)])

    def _keep(self, items: list[CacheItem], entries: list[Entry]) -> None:
        for item, entry in zip(items, entries, strict=True):
            _check_finite(item.what, entry)
            self._targets[item.folder].add(item, entry)
            self.tally.encoded += 1
            self.tally.encoded_bytes += _size(entry)
        self._count(items)
        if not self._checked_room:
            self._check_room(items, entries)
        self._targets[items[0].folder].release_written()

    def _check_room(self, items: list[CacheItem], entries: list[Entry]) -> None:
        """After the first batch, estimate the size of all entries and fail early if the disk is too small."""
        self._checked_room = True
        per_volume = sum(_size(entry) for entry in entries) / sum(item.volume for item in items)
        done = {item.key for item in items}
        for folder, rest in by_folder(self._missing).items():
            volume = sum(item.volume for item in rest if item.key not in done)
            self._targets[folder].store.check_room(int(volume * per_volume))

    def _exclude(self, item: CacheItem, error: UnreadableMediaError) -> None:
        dataset = error.dataset or ""
        self.tally.damaged[dataset, error.path] = DamagedItem(dataset, error.path, error.reason)
        self._excluded.add(dataset, error.path, error.reason)
        self._targets[item.folder].claims.release([item.key])
        self._count([item])

    def _count(self, items: list[CacheItem]) -> None:
        self._done += len(items)
        self._done_volume += sum(item.volume for item in items)
        spent = time.monotonic() - self._began
        rate = self._done / spent if self._done and spent else None
        # By volume, not by number of items: large items come first and take longer.
        left = spent * (self._volume / self._done_volume - 1) if self._done_volume else None
        self._on_progress(PassProgress(self._done, self._total, rate, left))


class _Target:
    """A store while a pass adds entries to it."""

    claims: Claims
    writer: Writer

    def __init__(self, store: DiskStore) -> None:
        self.store, self.folder = store, store.folder
        self._unwritten: deque[Key] = deque()
        """Keys of added entries, oldest first. Their claims are kept until the entries are on disk."""
        self._last_mtime: int | None = None
        store.refresh()

    def enter(self, stack: ExitStack, flush: Flush) -> None:
        # The order matters: the stack closes the writer first, so its last flush happens before the claims end.
        self.claims = stack.enter_context(Claims(self.store))
        self.writer = stack.enter_context(self.store.writer(flush))

    def missing(self, items: Sequence[CacheItem]) -> list[CacheItem]:
        missing = {*self.store.find([item.key for item in items]).missing}
        return [item for item in items if item.key in missing]

    def refresh_if_changed(self) -> None:
        """Refresh the store if the modification time of its folder changed, which means that shards were added."""
        try:
            mtime = self.store.shards_folder.stat().st_mtime_ns
        except OSError as error:
            raise unreadable(error, self.folder) from error
        if mtime != self._last_mtime:
            self.store.refresh()
            self._last_mtime = mtime

    def add(self, item: CacheItem, entry: Entry) -> None:
        self.writer.add(item.origin, entry, key=item.key)
        self._unwritten.append(item.key)

    def flush(self) -> None:
        self.writer.flush()
        self.release_written()

    def release_written(self) -> None:
        """Release the claims on entries that are on disk, where other processes can find them."""
        while self._unwritten and self._unwritten[0] in self.store:
            self.claims.release([self._unwritten.popleft()])


@dataclass(frozen=True)
class _Batch(Generic[CacheItem, Decoded]):
    items: list[CacheItem]
    futures: list[Future[Decoded]]


def _is_enough(queue: deque[_Batch[CacheItem, Decoded]]) -> bool:
    """Whether enough batches are decoded ahead, so that the first one should be encoded now."""
    size = sum(item.decoded_bytes for batch in queue for item in batch.items)
    return len(queue) > AHEAD_BATCHES or (len(queue) > 1 and size > AHEAD_BYTES)


def _size(entry: Entry) -> int:
    return sum(tensor.nbytes for tensor in entry.values())


def _check_finite(what: str, entry: Entry) -> None:
    """Reject NaN and infinity before they are stored, because a cache would return them in every epoch."""
    for name, tensor in entry.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        extremes = tensor.aminmax()  # both are NaN if any element is
        if not (math.isfinite(extremes.min) and math.isfinite(extremes.max)):
            hint = "use a VAE or text encoder that works in this precision, or set training.mixed_precision: bf16"
            raise CacheError(Problem(f"{name} of {what}", "non-finite values (inf or nan)", "finite values", hint))


# -- claims ------------------------------------------------------------------------------------------------------------


class Claims:
    """The claims of one process on entries of one store. They do not exclude other threads of the same process.

    Several processes that build one cache divide the work: a process encodes the entries whose keys it locked. The
    ranks of one run and independent commands share work in the same way. A claim is a lock on one byte of `work.lock`,
    at an offset computed from the key. The kernel releases it when its process ends for any reason, so entries claimed
    by a killed process are available again at once and nothing has to be cleaned up. Faster ranks claim more.

    Claims only avoid duplicate work; correctness does not depend on them. On a file system without locks every claim
    succeeds, and two processes that encode the same entry write the same content.
    """

    def __init__(self, store: DiskStore) -> None:
        self._folder = store.folder
        try:
            self._descriptor = open_lock_file(store.folder / "work.lock")
        except OSError as error:
            raise unwritable(error, store.folder, needed=0, free=None) from error
        self._held: set[Key] = set()
        self.are_exclusive = True
        """Becomes False when the file system turns out to have no locks."""

    def take(self, key: Key) -> bool:
        """Claim an entry. Returns False if another process holds it."""
        try:
            result = lock_byte(self._descriptor, _lock_offset(key))
        except OSError as error:
            raise unwritable(error, self._folder, needed=0, free=None) from error
        if result == "busy":
            return False
        if result == "unsupported":
            self.are_exclusive = False
        self._held.add(key)
        return True

    def release(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._held.discard(key)
            if self.are_exclusive:
                with suppress(OSError):  # closing the file will release it
                    unlock_byte(self._descriptor, _lock_offset(key))

    def close(self) -> None:
        os.close(self._descriptor)  # releases all locks
        self._held.clear()

    def __enter__(self) -> Claims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock_offset(key: Key) -> int:
    """60 bits of the key fit a signed file offset. Two keys with the same offset would merely exclude each other."""
    return int(key[:15], 16)
