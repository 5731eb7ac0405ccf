"""Asynchronous transfer of the next batches to the GPU while the current one is used.

A `Mover` starts the transfer of a batch and later returns its tensors. `LookAhead` keeps a few transfers in progress.
It adapts their number: more if steps wait for data, fewer if memory is tight. The host never waits for the GPU here.
The source of batches runs on the calling thread, so it should be fast or prepare data ahead itself.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from gracetune.memory.errors import CacheWrittenError
from gracetune.memory.stacked import CopyBytes, Stacked

if TYPE_CHECKING:
    import torch

    Tensors: TypeAlias = Mapping[str, torch.Tensor]
    Parts: TypeAlias = Mapping[str, torch.Tensor | Stacked]
    """An input batch: complete tensors, or descriptions of how to assemble them."""


class Arrival(Protocol):
    """When a batch was requested and when it became available, as GPU timestamps."""

    def is_past(self) -> bool:
        """Whether the GPU has reached both timestamps."""

    def waited_ms(self) -> float:
        """Time between request and availability."""

    def until_ms(self, following: Arrival) -> float:
        """Time from the availability of this batch to the request of the next one: the compute time of the step."""


class BatchInFlight(Protocol):
    """A batch in transfer."""

    bytes: int

    def arrive(self) -> tuple[Tensors, Arrival | None]:
        """The tensors, ready for use on the current stream. The arrival is None if there was no transfer."""

    def release(self) -> bool:
        """Declare that the work enqueued so far is the last to use these tensors.

        Returns True if the GPU has already finished that work and is idle.
        """


class Mover(Protocol):
    """Transfers batches."""

    def start(self, batch: Parts, *, ahead: bool = True) -> BatchInFlight:
        """Start a transfer. With `ahead=False` it begins only after the GPU finished all work enqueued so far."""

    def keep(self, slots: int) -> None:
        """Free buffers beyond this number of batches in transfer or in use."""

    def close(self) -> None:
        """Wait until no source is read any more, and drop all references to them."""


@dataclass
class _Available:
    """A batch that needs no asynchronous transfer."""

    tensors: Tensors
    bytes: int = 0
    lent: tuple[str, ...] = ()
    """Names of the tensors that are views of the cache."""
    versions: dict[str, int] = field(default_factory=dict)
    """Version counters of the lent tensors at arrival. torch increments them on in-place writes, so a write is
    detected without reading the data."""

    def arrive(self) -> tuple[Tensors, Arrival | None]:
        self.versions = {name: self.tensors[name]._version for name in self.lent}
        return self.tensors, None

    def release(self) -> bool:
        written = [name for name, version in self.versions.items() if self.tensors[name]._version != version]
        self.tensors, self.versions = {}, {}
        if written:
            raise CacheWrittenError(written)
        return False


class InPlace:
    """A mover for the CPU and for machines whose CPU and GPU share memory: batches are read in place.

    `Stacked` tensors are assembled immediately on the current stream; that is the only copy. With `lend`, a batch of
    one sample is a view of the cache without any copy, and a step that writes into it raises CacheWrittenError.
    """

    def __init__(self, device: torch.device | None = None, *, lend: bool = False) -> None:
        self._device, self._lend = device, lend

    def start(self, batch: Parts, *, ahead: bool = True) -> BatchInFlight:
        import torch

        if not any(isinstance(part, Stacked) for part in batch.values()):
            return _Available(cast("Tensors", batch))
        # The caller may be in inference mode (validation), but tensors created in it cannot be used for training.
        tensors: dict[str, torch.Tensor] = {}
        lent = []
        with torch.inference_mode(False), torch.no_grad():
            for name, part in batch.items():
                if not isinstance(part, Stacked):
                    tensors[name] = part
                elif self._lend and (view := part.in_place(self._device)) is not None:
                    tensors[name] = view
                    lent.append(name)
                else:
                    tensors[name] = part.build(self._device)
        return _Available(tensors, lent=tuple(lent))

    def keep(self, slots: int) -> None:
        pass

    def close(self) -> None:
        pass


class RingMover:
    """A mover that copies batches into a small ring of GPU buffers, on a separate stream.

    The parts of a `Stacked` tensor are copied directly to their place in the ring, without assembly on the host. A
    source may be pinned host memory or a CUDA view of managed memory. Both are read at the speed of the link, and the
    pages stay where they are. The source must be complete when the transfer starts. A slot is overwritten only after
    the step that used it has finished.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.copy_bytes = copies_on(self.stream)
        self._free: deque[_Slot] = deque()
        self._slots = 0
        self._most = 1 << 30
        self._under_way: deque[tuple[torch.cuda.Event, Parts]] = deque()
        """References to the sources of running copies, with their end. torch does not know about `copy_bytes`, so it
        would reuse the memory of a source without a reference."""

    def start(self, batch: Parts, *, ahead: bool = True) -> BatchInFlight:
        import torch

        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        if not ahead:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        slot = self._free.popleft() if self._free else self._new_slot()
        self._under_way.append((slot.fill(batch), batch))
        return slot

    def _new_slot(self) -> _Slot:
        self._slots += 1
        return _Slot(self)

    def give_back(self, slot: _Slot) -> None:
        self._free.append(slot)
        self.keep(self._most)

    def keep(self, slots: int) -> None:
        self._most = slots
        while self._free and self._slots > slots:
            self._free.popleft()
            self._slots -= 1

    def close(self) -> None:
        self.stream.synchronize()
        self._under_way.clear()


def copies_on(stream: torch.cuda.Stream) -> CopyBytes | None:
    """A function that enqueues many copies in one driver call; None without the native library, so torch copies."""
    from gracetune.memory.native import Unavailable, load

    uvm = load()
    if isinstance(uvm, Unavailable):
        return None
    device, handle = stream.device.index, stream.cuda_stream
    return lambda targets, sources, sizes: uvm.copy_batch(device, targets, sources, sizes, handle)


class _CudaArrival:
    def __init__(self) -> None:
        import torch

        self.begin_mark = torch.cuda.Event(enable_timing=True)
        self.got = torch.cuda.Event(enable_timing=True)

    def is_past(self) -> bool:
        return bool(self.got.query())

    def waited_ms(self) -> float:
        return float(self.begin_mark.elapsed_time(self.got))

    def until_ms(self, following: Arrival) -> float:
        assert isinstance(following, _CudaArrival)
        return float(self.got.elapsed_time(following.begin_mark))


class _Slot:
    """GPU buffers for one batch, reused for later batches.

    Two events order the streams. The copy stream waits for `_used` before it overwrites the buffers, and the step's
    stream waits for `_moved` before it reads them.
    """

    def __init__(self, ring: RingMover) -> None:
        import torch

        self.bytes = 0
        self._ring: RingMover = weakref.proxy(ring)  # weak, because the ring holds its slots
        self._buffers: dict[str, torch.Tensor] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._moved = torch.cuda.Event()
        """End of the copies; a new event for every batch."""
        self._used = torch.cuda.Event()
        self._user: torch.cuda.Stream | None = None

    def fill(self, batch: Parts) -> torch.cuda.Event:
        """Enqueue the copies of a batch. Returns an event after which the sources are no longer read."""
        import torch

        copy_stream = self._ring.stream
        copy_stream.wait_event(self._used)
        self._user = None
        self.bytes = 0
        self._tensors = {}
        # The caller may be in inference mode (validation), but buffers created in it cannot be used for training.
        with torch.inference_mode(False), torch.no_grad():
            targets = {name: self._target(name, source) for name, source in batch.items()}
            with torch.cuda.stream(copy_stream):
                for name, source in batch.items():
                    if isinstance(source, Stacked):
                        self._tensors[name] = source.write(targets[name], self._ring.copy_bytes)
                    else:
                        self._tensors[name] = targets[name].copy_(source, non_blocking=True)
                    self.bytes += source.nbytes
        self._moved = torch.cuda.Event()
        self._moved.record(copy_stream)
        return self._moved

    def _target(self, name: str, source: torch.Tensor | Stacked) -> torch.Tensor:
        """A view of the slot's buffer for this key. The buffer grows to the largest batch so far.

        The buffer is allocated on the step's stream, so that an overflow arena can serve it. Work on that stream may
        still use the memory, so the copy stream waits for it; `record_stream` protects it from early reuse afterwards.
        """
        import torch

        needed = source.nbytes
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < needed:
            buffer = self._buffers[name] = torch.empty(needed, dtype=torch.uint8, device=self._ring.device)
            buffer.record_stream(self._ring.stream)
            self._ring.stream.wait_stream(torch.cuda.current_stream(self._ring.device))
        return buffer[:needed].view(source.dtype).view(source.shape)

    def arrive(self) -> tuple[Tensors, Arrival | None]:
        import torch

        self._user = torch.cuda.current_stream(self._ring.device)
        arrival = _CudaArrival()
        arrival.begin_mark.record(self._user)
        self._user.wait_event(self._moved)
        arrival.got.record(self._user)
        for buffer in self._buffers.values():
            buffer.record_stream(self._user)
        return dict(self._tensors), arrival

    def release(self) -> bool:
        # Use the stream of arrive(); another one may be current now. It is None if the batch was discarded unused.
        is_done = False
        if self._user is not None:
            is_done = self._user.query()
            self._used.record(self._user)
        self._ring.give_back(self)
        return is_done


@dataclass(frozen=True)
class Depth:
    """The number of batches to keep in transfer, and why."""

    value: int
    reason: str


OnDepth: TypeAlias = Callable[[Depth, Depth], None]
"""Called with the previous and the new depth."""


def next_depth(depth: int, *, waited_ms: float, step_ms: float, memory_tight: bool, most: int = 4) -> Depth:
    """The depth after a step: one more if the step waited for over 1 % of its time, one less if memory is tight."""
    if memory_tight:
        return Depth(max(1, depth - 1), "memory is tight" if depth > 1 else "memory is tight; 1 is the minimum")
    if waited_ms > 0.01 * step_ms:
        reason = f"the step waited {waited_ms:.2f} ms for its data and computed for {step_ms:.2f} ms"
        return Depth(min(most, depth + 1), reason if depth < most else f"{reason}; {most} is the maximum")
    return Depth(depth, "the data was available in time")


@dataclass
class LookAheadStats:
    """Totals of a look-ahead. Times are the GPU's, of the steps that it has finished."""

    batches: int = 0
    prefetched_bytes: int = 0
    wait_ms: float = 0.0
    step_ms: float = 0.0


class LookAhead:
    """Iterates over batches on the GPU. A batch may be used until the next one is requested."""

    def __init__(
        self,
        batches: Iterable[Parts],
        mover: Mover,
        *,
        depth: int = 2,
        most: int = 4,
        memory_tight: Callable[[], bool] = lambda: False,
        stats: LookAheadStats | None = None,
        on_change: OnDepth | None = None,
    ) -> None:
        """`depth` is the number of transfers kept in progress. If it is 0, it never changes, and a transfer begins when
        its batch is requested. `on_change` is called with the old and new depth at every change, without synchronizing
        the GPU."""
        if not 0 <= depth <= most:
            raise ValueError(f"depth must be between 0 and {most}, not {depth}")
        self.depth = Depth(depth, "as configured")
        self.on_change = on_change
        self.stats = LookAheadStats() if stats is None else stats
        self._source = iter(batches)
        self._mover = mover
        self._most = most
        self._tight = memory_tight
        self._under_way: deque[BatchInFlight] = deque()
        """Batches in transfer, the next one first."""
        self._failure: Exception | None = None
        self._in_use: BatchInFlight | None = None
        self._arrivals: deque[Arrival] = deque()
        """Of the batches whose steps are not evaluated yet."""

    def __iter__(self) -> Iterator[Tensors]:
        return self

    def __next__(self) -> Tensors:
        is_gpu_idle = self._in_use is not None and self._in_use.release()
        self._in_use = None
        self.catch_up()
        self._mover.keep(self.depth.value + 1)
        if not self._under_way or not is_gpu_idle:
            self._start_moves(max(1, self.depth.value))
        if not self._under_way:
            raise self._failure or StopIteration
        batch = self._under_way.popleft()
        tensors, arrival = batch.arrive()
        self._in_use = batch
        self.stats.batches += 1
        self.stats.prefetched_bytes += batch.bytes
        if arrival is not None:
            self._arrivals.append(arrival)
        # Start the next transfers now, so that they overlap with the coming step. But if the GPU is idle, return first:
        # launching the step is more urgent, and the next call starts the transfers.
        if not (is_gpu_idle and self._under_way):
            self._start_moves(self.depth.value)
        return tensors

    def discard(self) -> None:
        """Drop the batches in transfer and a failure of the source, because the source will return others instead.

        The batch in use is kept. Buffers with running copies are overwritten only after these have ended.
        """
        for batch in self._under_way:
            batch.release()
        self._under_way.clear()
        self._failure = None

    def close(self) -> None:
        """Drop all batches, including the one in use. Their sources can be freed afterwards."""
        self.discard()
        self._in_use = None
        self._mover.close()

    @property
    def is_stuck(self) -> bool:
        """Whether the source failed for the next batch. The next call raises that error, unless `discard` is called."""
        return self._failure is not None and not self._under_way

    @property
    def is_deepest(self) -> bool:
        """Whether the depth is at its maximum."""
        return self.depth.value >= self._most

    def _start_moves(self, wanted: int) -> None:
        while len(self._under_way) < wanted and self._failure is None:
            try:
                batch = next(self._source, None)
            except Exception as error:  # noqa: BLE001 - raised again when it is this batch's turn
                self._failure = error
                return
            if batch is None:
                return
            self._under_way.append(self._mover.start(batch, ahead=self.depth.value > 0))

    def catch_up(self) -> None:
        """Evaluate the steps that the GPU has finished, and adapt the depth. Running steps are evaluated later."""
        past = [arrival for arrival in self._arrivals if arrival.is_past()]
        for arrival, following in pairwise(past):
            self._arrivals.popleft()
            waited, step = arrival.waited_ms(), arrival.until_ms(following)
            self.stats.wait_ms += waited
            self.stats.step_ms += step
            if self.depth.value > 0:
                before = self.depth
                self.depth = next_depth(
                    before.value, waited_ms=waited, step_ms=step, memory_tight=self._tight(), most=self._most
                )
                if self.on_change is not None and self.depth.value != before.value:
                    self.on_change(before, self.depth)
