"""Denoisers that take turns: which one works at which noise level, whose turn it is, and where the idle one waits."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from gracetune.hardware.machine import ProfileName
from gracetune.memory.placement import place
from gracetune.models.activation_parking import Clock, CudaClock, HostClock
from gracetune.models.expert_streaming import Following, StreamedParking
from gracetune.models.parking import ManagedParking, Parking, Room, Staying, device_room
from gracetune.models.spec import ExpertName, ModelFacts
from gracetune.units import format_bytes, format_duration

if TYPE_CHECKING:
    from gracetune.memory.managed import ManagedHeap

# -- whose turn it is: pure, and the same on every rank ---------------------------------------------------------------


def trained_experts(asked: Literal["both", "high", "low"], facts: ModelFacts) -> tuple[ExpertName, ...]:
    """Names in the order of their turns. A model with one denoiser trains that, whatever was asked."""
    names = tuple(expert.name for expert in facts.experts)
    if len(names) == 1 or asked == "both":
        return names
    return (names[0],) if asked == "high" else (names[-1],)


def expert_for_window(window: int, every: int, trained: tuple[ExpertName, ...]) -> ExpertName:
    """The expert of one optimizer window (counted from 0); each keeps its turn for `every` windows."""
    if window < 0 or every < 1 or not trained:
        raise ValueError(f"window {window}, every {every}, trained {trained}: need 0 or more, 1 or more, and a name")
    return trained[window // every % len(trained)]


def next_expert(window: int, every: int, trained: tuple[ExpertName, ...]) -> ExpertName | None:
    """Whom to `prepare` during this window: the next window's expert, where that is another one."""
    now, then = (expert_for_window(index, every, trained) for index in (window, window + 1))
    return None if now == then else then


def window_of_levels(expert: ExpertName, facts: ModelFacts) -> tuple[float, float]:
    """The noise levels to draw for an expert: from the first, up to but without the second.

    Without: the second is where the next expert begins. The highest of all is the end of the noise itself, which no
    draw has to reach.
    """
    for candidate in facts.experts:
        if candidate.name == expert:
            return candidate.lowest, candidate.highest
    raise KeyError(f"no expert {expert!r}; there are {[candidate.name for candidate in facts.experts]}")


# -- where the idle one waits -----------------------------------------------------------------------------------------

Way = Literal["resident", "pinned_copy", "managed"]


@dataclass(frozen=True)
class ParkingChoice:
    way: Way
    reason: str


def choose_parking(profile: ProfileName, *, park: bool, experts: int, managed: bool = True) -> ParkingChoice:
    """Pure. `park` is the plan's `park_experts`; `managed`: the managed-memory layer could be opened here."""
    if experts < 2:
        return ParkingChoice("resident", "resident: the model has one denoiser")
    where = place("cold_weights", profile)
    if where.place in ("host", "device"):
        return ParkingChoice("resident", f"resident: {where.reason}")
    if not park:
        return ParkingChoice("resident", "resident: both fit in the plan")
    if where.place == "managed_host" and managed:
        return ParkingChoice("managed", f"managed memory: {where.reason}")
    if where.place == "managed_host":
        return ParkingChoice("pinned_copy", "pinned copy: managed memory is off or not available here")
    return ParkingChoice("pinned_copy", f"pinned copy: {where.reason}")


@dataclass(frozen=True)
class Prepared:
    """Whether an expert is on its way ahead of its turn, and why or why not."""

    started: bool
    reason: str


@dataclass
class SwitchStats:
    """Times are the device's own clock, and come a little late: nobody waits for them."""

    count: int = 0
    followed_bytes: int = 0
    """Brought behind the last backward pass of the expert before."""
    waited_ms: float = 0.0
    """The device had nothing to do until an expert was there."""

    @property
    def line(self) -> str:
        behind = f"{format_bytes(self.followed_bytes)} behind the last backward pass of the one before"
        return f"experts: {self.count} switches, {behind}; the device waited {format_duration(self.waited_ms / 1000)}"


class _Waits:
    """When the device waited for an expert, by its own clock; what is over is counted."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def timed(self) -> Iterator[None]:
        asked = self._clock.mark()
        yield
        self._marks.append((asked, self._clock.mark()))

    def take_ms(self) -> float:
        taken = 0.0
        while self._marks and self._clock.is_past(self._marks[0][1]):
            taken += self._clock.between_ms(*self._marks.popleft())
        return taken


class ExpertHost:
    """Holds the denoisers of a model; one is active, the others may be away.

    `add` each one when it is loaded and its adapter attached: what needs a gradient then is never moved, and what does
    not is parked before the next one is loaded. Bring one ahead of its turn with `prepare`, take it with `activate`,
    all from the thread that trains. Parked memory is free again when the host and the denoisers are gone.
    """

    def __init__(
        self,
        make_parking: Callable[[nn.Module], Parking],
        reason: str,
        *,
        room: Room = lambda *, here, away: sys.maxsize,
        spare: int = 0,
        clock: Clock | None = None,
    ) -> None:
        """`spare` is the device memory a step still needs: nothing comes ahead of its turn into that."""
        self.reason = reason
        self._make_parking = make_parking
        self._room, self._spare = room, spare
        self._experts: dict[ExpertName, nn.Module] = {}
        self._parking: dict[ExpertName, Parking] = {}
        self._active: ExpertName | None = None
        self._coming: ExpertName | None = None
        self.switches = SwitchStats()
        self._waits = _Waits(clock or HostClock())

    @classmethod
    def open(
        cls, choice: ParkingChoice, device: torch.device, *, heap: ManagedHeap | None = None, spare: int = 0,
        blocks: Collection[str] = (),
    ) -> ExpertHost:  # fmt: skip
        """A host that puts the choice into force. `blocks` are the classes of the denoisers' blocks."""
        if choice.way == "resident":
            return cls(lambda module: Staying(), choice.reason)
        if choice.way == "managed" and heap is None:
            raise ValueError("parking in managed memory needs the heap of the device")

        def make(module: nn.Module) -> Parking:
            if choice.way == "managed" and heap is not None:
                return ManagedParking(module, heap)
            return StreamedParking.pinned(module, blocks, device)

        return cls(make, choice.reason, room=device_room(device), spare=spare, clock=CudaClock())

    def add(self, name: ExpertName, module: nn.Module) -> None:
        """Take a denoiser over, and park its frozen weights until it is activated."""
        if name in self._experts:
            raise ValueError(f"there is an expert {name!r} already")
        parking = self._make_parking(module)
        if isinstance(parking, StreamedParking):
            parking.waiting = self._waits.timed
        self._experts[name], self._parking[name] = module, parking

    @property
    def moves(self) -> bool:
        """Whether weights leave the device and come back elsewhere."""
        return not all(isinstance(one, Staying) for one in self._parking.values())

    @property
    def active(self) -> ExpertName | None:
        return self._active

    def module(self, name: ExpertName) -> nn.Module:
        """For adapters and optimizers, wherever its base weights are. To run it, `activate` it."""
        return self._experts[self._known(name)]

    def activate(self, name: ExpertName, *, at_once: bool = True) -> nn.Module:
        """The denoiser, ready for work; the one before it is parked.

        `at_once=False` is for who calls it next: what of it is still on its way is waited for by the block that needs
        it, and nobody is to read its weights before that.
        """
        if self._known(name) != self._active:
            leaving = [other for other in (self._active, self._coming) if other is not None and other != name]
            self._active = self._coming = None  # whatever fails below, nobody is taken for active who is not
            for other in leaving:
                self._parking[other].park()
            parking = self._parking[name]
            with self._waits.timed():
                if isinstance(parking, StreamedParking):
                    parking.expect()
                else:
                    parking.finish()
            self.switches.count += 1
            self.count_waits()
            self._active = name
        if at_once:
            self.settle()
        return self._experts[name]

    def settle(self) -> None:
        """All of the active one is there: whoever reads its weights finds them."""
        parking = None if self._active is None else self._parking[self._active]
        if isinstance(parking, StreamedParking):
            parking.arrive()

    @contextmanager
    def following(self, name: ExpertName | None) -> Iterator[None]:
        """The backward pass in here is the active one's last before this one's turn: if there is no room for both, its
        weights come in behind it, block by block. Whom `activate` then names first gets the rest."""
        leaving = None if self._active is None else self._parking[self._active]
        coming = None if name is None or self._coming is not None else self._parking[self._known(name)]
        if leaving is coming or not isinstance(leaving, StreamedParking) or not isinstance(coming, StreamedParking):
            yield
            return
        moving = Following(leaving, coming)
        try:
            with moving:
                yield
        finally:
            if moving.moved:  # the one that was active is no longer whole, the next one not yet
                self._active, self._coming = None, name
                leaving.park()
                self.switches.followed_bytes += moving.brought_bytes

    def count_waits(self) -> None:
        """What is over by now, into `switches`."""
        self.switches.waited_ms += self._waits.take_ms()

    def prepare(self, name: ExpertName) -> Prepared:
        """Start to bring an expert ahead of its turn, if there is room for both."""
        if self._known(name) in (self._active, self._coming):
            return Prepared(True, "already there or on its way")
        if self._coming is not None:
            return Prepared(False, f"{self._coming} is on its way")
        needed = self._parking[name].bytes
        room = self._room_left() - self._spare
        if needed > room:
            found = f"{format_bytes(needed)} needed, {format_bytes(max(0, room))} to spare"
            return Prepared(False, f"no room beside the active one: {found}; it is brought when its turn comes")
        try:
            self._parking[name].start()
        except torch.OutOfMemoryError:
            self._parking[name].park()  # pieces that were given room before
            return Prepared(False, "no room in one piece beside the active one; it is brought when its turn comes")
        self._coming = name
        return Prepared(True, "room for both: brought ahead of its turn")

    def _room_left(self) -> int:
        managed = {name: parking.managed for name, parking in self._parking.items()}
        here = sum(managed[name] for name in (self._active, self._coming) if name is not None)
        return self._room(here=here, away=sum(managed.values()) - here)

    def _known(self, name: ExpertName) -> ExpertName:
        if name not in self._experts:
            raise KeyError(f"no expert {name!r}; there are {[*self._experts]}")
        return name
