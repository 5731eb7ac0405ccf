"""Bringing the next batches to the GPU while this one computes.

A `Mover` starts the move of one batch and later hands it over. `LookAhead` keeps a few moves under way, and adapts
how many: more when the step had to wait for its data, fewer when memory is tight. Nothing here makes the host wait for
the GPU; the source of batches is asked on the calling thread, so it should be quick or decode ahead by itself.
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
    """A batch as it is given: whole tensors, or how to put them together."""


class Arrival(Protocol):
    """The moment a batch was asked for and the moment it was there, on the GPU's own clock."""

    def is_past(self) -> bool: ...

    def waited_ms(self) -> float: ...

    def until_ms(self, following: Arrival) -> float:
        """From having this batch to asking for the following one: the step's own time."""


class Moving(Protocol):
    """A batch under way."""

    bytes: int

    def arrive(self) -> tuple[Tensors, Arrival | None]:
        """The tensors, usable on the current stream from here on; None where arriving takes no time."""

    def release(self) -> bool:
        """The work given to the current stream so far was the last to use these tensors.

        True where the GPU has done it already and waits for more.
        """


class Mover(Protocol):
    def start(self, batch: Parts, *, ahead: bool = True) -> Moving:
        """`ahead` False: not before the GPU has done what it was given so far, as without any look-ahead."""

    def keep(self, slots: int) -> None:
        """No more than this many batches will be under way or in use: let go of room beyond it."""

    def close(self) -> None:
        """Wait until nothing that was given is read any more, and refer to none of it."""


@dataclass
class _Here:
    tensors: Tensors
    bytes: int = 0
    lent: tuple[str, ...] = ()
    """Which of them are views of the cache."""
    versions: dict[str, int] = field(default_factory=dict)
    """Of those, when they were handed over: torch counts writes, so one is noticed without looking at data."""

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
    """For the CPU and for one-pool machines: a batch is read where it lies.

    What is given in pieces is put together when it is given, on the current stream: the only copy that is made. With
    `lend` a batch of one sample is not even that, but a view of its pieces; a step that writes into it is an error.
    """

    def __init__(self, device: torch.device | None = None, *, lend: bool = False) -> None:
        self._device, self._lend = device, lend

    def start(self, batch: Parts, *, ahead: bool = True) -> Moving:
        import torch

        if not any(isinstance(part, Stacked) for part in batch.values()):
            return _Here(cast("Tensors", batch))
        # Whoever asks first may be validating: a tensor made in inference mode could never be trained on.
        tensors: dict[str, torch.Tensor] = {}
        lent = []
        with torch.inference_mode(False), torch.no_grad():
            for name, part in batch.items():
                if not isinstance(part, Stacked):
                    tensors[name] = part
                elif self._lend and (there := part.in_place(self._device)) is not None:
                    tensors[name] = there
                    lent.append(name)
                else:
                    tensors[name] = part.build(self._device)
        return _Here(tensors, lent=tuple(lent))

    def keep(self, slots: int) -> None:
        pass

    def close(self) -> None:
        pass


class RingMover:
    """Copies batches into a small ring of device buffers, on a stream of its own.

    What is given in pieces goes piece by piece into its place in the ring: nothing is put together on the host.
    The source may be pinned host memory or a CUDA view of managed memory: both are read at the link's speed, and
    neither moves. Its bytes must be complete when it is given. A ring slot is written again only after the step that
    used it has finished.
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
        """What is being copied: torch does not know that our own copies still read it."""

    def start(self, batch: Parts, *, ahead: bool = True) -> Moving:
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
    """Many copies in one call of the driver; None where the native library cannot be had, and torch makes them."""
    from gracetune.memory.native import Unavailable, load

    uvm = load()
    if isinstance(uvm, Unavailable):
        return None
    device, handle = stream.device.index, stream.cuda_stream
    return lambda targets, sources, sizes: uvm.copy_batch(device, targets, sources, sizes, handle)


class _CudaArrival:
    def __init__(self) -> None:
        import torch

        self.asked = torch.cuda.Event(enable_timing=True)
        self.got = torch.cuda.Event(enable_timing=True)

    def is_past(self) -> bool:
        return bool(self.got.query())

    def waited_ms(self) -> float:
        return float(self.asked.elapsed_time(self.got))

    def until_ms(self, following: Arrival) -> float:
        assert isinstance(following, _CudaArrival)
        return float(self.got.elapsed_time(following.asked))


class _Slot:
    """Device room for one batch, kept from batch to batch."""

    def __init__(self, ring: RingMover) -> None:
        import torch

        self.bytes = 0
        self._ring: RingMover = weakref.proxy(ring)  # which holds the slots: all of it goes when nobody needs it
        self._room: dict[str, torch.Tensor] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._moved = torch.cuda.Event()
        """A new one for every batch."""
        self._used = torch.cuda.Event()
        self._user: torch.cuda.Stream | None = None

    def fill(self, batch: Parts) -> torch.cuda.Event:
        """Returns the moment from which on the batch itself is not read any more."""
        import torch

        side = self._ring.stream
        side.wait_event(self._used)
        self._user = None
        self.bytes = 0
        self._tensors = {}
        # Whoever asks first may be validating: room made in inference mode could never be trained on.
        with torch.inference_mode(False), torch.no_grad():
            targets = {name: self._target(name, source) for name, source in batch.items()}
            with torch.cuda.stream(side):
                for name, source in batch.items():
                    if isinstance(source, Stacked):
                        self._tensors[name] = source.write(targets[name], self._ring.copy_bytes)
                    else:
                        self._tensors[name] = targets[name].copy_(source, non_blocking=True)
                    self.bytes += source.nbytes
        self._moved = torch.cuda.Event()
        self._moved.record(side)
        return self._moved

    def _target(self, name: str, source: torch.Tensor | Stacked) -> torch.Tensor:
        """A view of the slot's room for this key, which grows to the largest batch it has seen.

        The room comes from the step's own stream, so that an overflow arena can serve it too; its memory may have been
        used there a moment ago, so the copies wait for that, and the allocator learns who else uses it.
        """
        import torch

        needed = source.nbytes
        room = self._room.get(name)
        if room is None or room.numel() < needed:
            room = self._room[name] = torch.empty(needed, dtype=torch.uint8, device=self._ring.device)
            room.record_stream(self._ring.stream)
            self._ring.stream.wait_stream(torch.cuda.current_stream(self._ring.device))
        return room[:needed].view(source.dtype).view(source.shape)

    def arrive(self) -> tuple[Tensors, Arrival | None]:
        import torch

        self._user = torch.cuda.current_stream(self._ring.device)
        arrival = _CudaArrival()
        arrival.asked.record(self._user)
        self._user.wait_event(self._moved)
        arrival.got.record(self._user)
        for room in self._room.values():
            room.record_stream(self._user)
        return dict(self._tensors), arrival

    def release(self) -> bool:
        # The stream that used the batch, whichever is current by now; none where it was discarded before it arrived.
        is_done = False
        if self._user is not None:
            is_done = self._user.query()
            self._used.record(self._user)
        self._ring.give_back(self)
        return is_done


@dataclass(frozen=True)
class Depth:
    """How many batches are kept under way, and why."""

    value: int
    reason: str


OnDepth: TypeAlias = Callable[[Depth, Depth], None]
"""The depth before, and the one from now on with its reason."""


def next_depth(depth: int, *, waited_ms: float, step_ms: float, memory_tight: bool, most: int = 4) -> Depth:
    """One deeper after a step that waited for more than 1 % of its time, one shallower while memory is tight."""
    if memory_tight:
        return Depth(max(1, depth - 1), "memory is tight" if depth > 1 else "memory is tight, and one is the least")
    if waited_ms > 0.01 * step_ms:
        reason = f"the step waited {waited_ms:.2f} ms for its data and computed for {step_ms:.2f} ms"
        return Depth(min(most, depth + 1), reason if depth < most else f"{reason}, and {most} is the most")
    return Depth(depth, "the data was there in time")


@dataclass
class LookAheadStats:
    batches: int = 0
    prefetched_bytes: int = 0
    wait_ms: float = 0.0
    step_ms: float = 0.0


class LookAhead:
    """Iterates over batches that are on the GPU already. Using one ends when the next is asked for."""

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
        """`on_change` gets the depth before and after every change; nothing is synchronized for it."""
        if not 0 <= depth <= most:
            raise ValueError(f"a look-ahead of {depth} is not between 0 and {most}")
        self.depth = Depth(depth, "as asked")
        self.on_change = on_change
        self.stats = LookAheadStats() if stats is None else stats
        self._source = iter(batches)
        self._mover = mover
        self._most = most
        self._tight = memory_tight
        self._under_way: deque[Moving] = deque()
        self._failure: Exception | None = None
        self._in_use: Moving | None = None
        self._arrivals: deque[Arrival] = deque()

    def __iter__(self) -> Iterator[Tensors]:
        return self

    def __next__(self) -> Tensors:
        is_awaited = self._in_use is not None and self._in_use.release()
        self._in_use = None
        self.catch_up()
        self._mover.keep(self.depth.value + 1)
        if not self._under_way or not is_awaited:
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
        # Refill at once, so that the next move overlaps the step that starts now; unless the GPU has nothing to do
        # until it is given that step. Then the next call refills, if it can.
        if not (is_awaited and self._under_way):
            self._start_moves(self.depth.value)
        return tensors

    def discard(self) -> None:
        """Forget the batches under way, and what went wrong with them: the source will give others instead.

        The batch in use stays. Room whose copies are still running is only written again after they have ended.
        """
        for batch in self._under_way:
            batch.release()
        self._under_way.clear()
        self._failure = None

    def close(self) -> None:
        """Forget all batches, the one in use too: what they were read from can be freed when this returns."""
        self.discard()
        self._in_use = None
        self._mover.close()

    @property
    def is_stuck(self) -> bool:
        """The source failed for the batch whose turn it is: the next call raises that, unless it is discarded."""
        return self._failure is not None and not self._under_way

    @property
    def is_deepest(self) -> bool:
        """It cannot go further ahead than it does."""
        return self.depth.value >= self._most

    def _start_moves(self, wanted: int) -> None:
        while len(self._under_way) < wanted and self._failure is None:
            try:
                batch = next(self._source, None)
            except Exception as error:  # noqa: BLE001 - whatever the source raises is raised in its turn, after the batches before it
                self._failure = error
                return
            if batch is None:
                return
            self._under_way.append(self._mover.start(batch, ahead=self.depth.value > 0))

    def catch_up(self) -> None:
        """Judge the steps whose end the GPU has reached; those still running are judged later, never waited for."""
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
