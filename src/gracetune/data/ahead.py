"""Decoding ahead of the step: threads load the samples of the next batches while this one is used.

Threads, because Pillow, PyAV and the compressors release the interpreter while they work, share staged pages for
nothing, and survive what a fork after CUDA does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from gracetune.data.loader import EpochEnd, Exhausted, Loader, Outcome
from gracetune.data.refs import BatchRef, SampleRef

Decoded = TypeVar("Decoded")


@dataclass(frozen=True)
class LoadedBatch(Generic[Decoded]):
    """A batch and what `load` made of each of its samples."""

    ref: BatchRef
    samples: tuple[Decoded, ...]


class Ahead(Generic[Decoded]):
    """A loader whose batches arrive decoded. Its state is the loader's own: what was only looked at does not count."""

    def __init__(
        self, loader: Loader, load: Callable[[SampleRef], Decoded], executor: ThreadPoolExecutor, depth: int
    ) -> None:
        self._loader, self._load, self._executor, self._depth = loader, load, executor, depth
        self._pending: deque[tuple[BatchRef, list[Future[Decoded]]]] = deque()

    def next_batch(self, size: int | None = None, *, step: int = 0) -> LoadedBatch[Decoded] | EpochEnd | Exhausted:
        """As `Loader.next_batch`. A sample that cannot be decoded raises when its turn comes, and names itself.

        Then the loader has not moved: after `Loader.exclude` the rest of the batch comes with the next call.
        """
        batch = self._look_ahead(size, step)
        samples = tuple(future.result() for future in self._pending[0][1]) if isinstance(batch, BatchRef) else ()
        outcome = self._loader.next_batch(size, step=step)
        if not isinstance(outcome, BatchRef):
            return outcome
        self._pending.popleft()
        return LoadedBatch(outcome, samples)

    def _look_ahead(self, size: int | None, step: int) -> Outcome | None:
        """Start what is missing; drop what will not come after all. Returns what the next call of the loader brings."""
        outcomes = self._loader.peek(1 + self._depth, size, step=step)
        coming = [batch for batch in outcomes if isinstance(batch, BatchRef)]
        started = {id(batch): (batch, futures) for batch, futures in self._pending}
        kept = {id(batch) for batch in coming}
        for key, (_, futures) in started.items():
            if key not in kept:
                for future in futures:
                    future.cancel()
        self._pending = deque(started.get(id(batch)) or (batch, self._start(batch)) for batch in coming)
        return next(iter(outcomes), None)

    def _start(self, batch: BatchRef) -> list[Future[Decoded]]:
        return [self._executor.submit(self._load, sample) for sample in batch.samples]


@contextmanager
def decode_ahead(
    loader: Loader, load: Callable[[SampleRef], Decoded], *, workers: int = 4, depth: int = 2
) -> Iterator[Ahead[Decoded]]:
    """While a batch is used, the next `depth` are being decoded or ready, by `workers` threads."""
    if workers < 1 or depth < 1:
        raise ValueError(f"{workers} workers, {depth} batches ahead")
    executor = ThreadPoolExecutor(workers, thread_name_prefix="decode")
    try:
        yield Ahead(loader, load, executor, depth)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
