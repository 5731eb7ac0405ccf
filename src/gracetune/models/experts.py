"""Models with two denoisers (experts): which one trains at which step, and where the inactive one is kept."""

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
from gracetune.memory.placement import choose_placement
from gracetune.models.activation_parking import Clock, CudaClock, HostClock
from gracetune.models.expert_streaming import StreamedParking, StreamedSwap
from gracetune.models.parking import ManagedParking, NoParking, Parking, ParkingRoom, device_room
from gracetune.models.spec import ExpertName, ModelFacts
from gracetune.units import format_bytes, format_duration

if TYPE_CHECKING:
    from gracetune.memory.managed import ManagedHeap

# -- the schedule: pure, and the same on every rank --------------------------------------------------------------------


def trained_experts(setting: Literal["both", "high", "low"], facts: ModelFacts) -> tuple[ExpertName, ...]:
    """Names in the order of their turns. A model with one denoiser trains that one, whatever `setting` says."""
    names = tuple(expert.name for expert in facts.experts)
    if len(names) == 1 or setting == "both":
        return names
    return (names[0],) if setting == "high" else (names[-1],)


def expert_for_step(step: int, every: int, trained: tuple[ExpertName, ...]) -> ExpertName:
    """The expert trained in optimizer step `step` (from 0). Each expert keeps its turn for `every` steps."""
    if step < 0 or every < 1 or not trained:
        raise ValueError(f"step {step}, every {every}, trained {trained}: expected 0 or more, 1 or more, and a name")
    return trained[step // every % len(trained)]


def next_expert(step: int, every: int, trained: tuple[ExpertName, ...]) -> ExpertName | None:
    """The expert to `prepare` during this step: the next step's, if it is another one."""
    now, then = (expert_for_step(index, every, trained) for index in (step, step + 1))
    return None if now == then else then


def noise_range_of(expert: ExpertName, facts: ModelFacts) -> tuple[float, float]:
    """The range of noise levels an expert is trained at, without its upper end.

    The upper end is where the next expert begins. For the highest expert it is pure noise, which need not be sampled.
    """
    for candidate in facts.experts:
        if candidate.name == expert:
            return candidate.lowest, candidate.highest
    raise KeyError(f"no expert {expert!r}; expected one of {[candidate.name for candidate in facts.experts]}")


# -- where the inactive expert is kept ---------------------------------------------------------------------------------

Way = Literal["resident", "pinned_copy", "managed"]


@dataclass(frozen=True)
class ParkingChoice:
    way: Way
    reason: str


def choose_parking(profile: ProfileName, *, park: bool, experts: int, managed: bool = True) -> ParkingChoice:
    """Pure. `park` is the plan's `park_experts`. `managed` says whether the managed-memory layer is available."""
    if experts < 2:
        return ParkingChoice("resident", "resident: the model has one denoiser")
    placement = choose_placement("cold_weights", profile)
    if placement.kind in ("host", "device"):
        return ParkingChoice("resident", f"resident: {placement.reason}")
    if not park:
        return ParkingChoice("resident", "resident: both fit in the plan")
    if placement.kind == "managed_host" and managed:
        return ParkingChoice("managed", f"managed memory: {placement.reason}")
    if placement.kind == "managed_host":
        return ParkingChoice("pinned_copy", "pinned copy: managed memory is off or not available here")
    return ParkingChoice("pinned_copy", f"pinned copy: {placement.reason}")


@dataclass(frozen=True)
class PreparedExpert:
    """Whether an expert is being copied ahead of its turn, and why or why not."""

    started: bool
    reason: str


@dataclass
class SwitchStats:
    """Times come from device events and are read only once complete, so they lag slightly."""

    count: int = 0
    """Activations of an expert that was not active, the first one included."""
    followed_bytes: int = 0
    """Bytes copied during the last backward pass of the expert before."""
    waited_ms: float = 0.0
    """Time the device stalled because an expert had not arrived."""

    @property
    def line(self) -> str:
        early = f"{format_bytes(self.followed_bytes)} copied during the backward pass before"
        return f"experts: {self.count} switches, {early}; the device waited {format_duration(self.waited_ms / 1000)}"


class _Waits:
    """Measures how long the device waits for experts. Only completed waits are counted."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def timed(self) -> Iterator[None]:
        before = self._clock.mark()
        yield
        self._marks.append((before, self._clock.mark()))

    def take_ms(self) -> float:
        taken = 0.0
        while self._marks and self._clock.is_past(self._marks[0][1]):
            taken += self._clock.between_ms(*self._marks.popleft())
        return taken


class ExpertHost:
    """Holds the denoisers of a model. One is active; the weights of the others may be parked in host memory.

    Call `add` for each one after it is loaded and its adapter is attached. Parameters that require a gradient at that
    point never move; all others are parked before the next denoiser is loaded. `prepare` copies an expert ahead of its
    turn, and `activate` makes it the active one. Call all methods from the training thread. The parked memory is freed
    when the host and the denoisers are garbage-collected.
    """

    def __init__(
        self,
        make_parking: Callable[[nn.Module], Parking],
        reason: str,
        *,
        room: ParkingRoom = lambda *, on_device, elsewhere: sys.maxsize,
        spare: int = 0,
        clock: Clock | None = None,
    ) -> None:
        """`spare` is the device memory a step still needs. An expert is not copied ahead of its turn into that."""
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
        """The host for a parking choice. `blocks` are the class names of the denoisers' blocks."""
        if choice.way == "resident":
            return cls(lambda module: NoParking(), choice.reason)
        if choice.way == "managed" and heap is None:
            raise ValueError("parking in managed memory needs the heap of the device")

        def make(module: nn.Module) -> Parking:
            if choice.way == "managed" and heap is not None:
                return ManagedParking(module, heap)
            return StreamedParking.pinned(module, blocks, device)

        return cls(make, choice.reason, room=device_room(device), spare=spare, clock=CudaClock())

    def add(self, name: ExpertName, module: nn.Module) -> None:
        """Take ownership of a denoiser, and park its frozen weights until it is activated."""
        if name in self._experts:
            raise ValueError(f"there is an expert {name!r} already")
        parking = self._make_parking(module)
        if isinstance(parking, StreamedParking):
            parking.waiting = self._waits.timed
        self._experts[name], self._parking[name] = module, parking

    @property
    def moves(self) -> bool:
        """Whether the weights of an inactive expert leave the device. Pinned copies come back at another address."""
        return not all(isinstance(one, NoParking) for one in self._parking.values())

    @property
    def active(self) -> ExpertName | None:
        return self._active

    def module(self, name: ExpertName) -> nn.Module:
        """The denoiser, for adapters and optimizers, wherever its base weights are. Call `activate` to run it."""
        return self._experts[self._known(name)]

    def activate(self, name: ExpertName, *, at_once: bool = True) -> nn.Module:
        """Make an expert active and return its denoiser; the previous one is parked.

        With `at_once=False` the next forward pass waits for each block's weights when it calls the block. Do not read
        the weights before that.
        """
        if self._known(name) != self._active:
            leaving = [other for other in (self._active, self._coming) if other is not None and other != name]
            self._active = self._coming = None  # if anything below fails, no expert counts as active
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
        """Wait until all weights of the active expert are on the device, so that they can be read."""
        parking = None if self._active is None else self._parking[self._active]
        if isinstance(parking, StreamedParking):
            parking.arrive()

    @contextmanager
    def following(self, name: ExpertName | None) -> Iterator[None]:
        """Context for the active expert's last backward pass before expert `name` takes over.

        If there is no room for both, the weights of `name` are copied in block by block as the backward pass frees
        memory. `activate` copies the rest.
        """
        leaving = None if self._active is None else self._parking[self._active]
        coming = None if name is None or self._coming is not None else self._parking[self._known(name)]
        if leaving is coming or not isinstance(leaving, StreamedParking) or not isinstance(coming, StreamedParking):
            yield
            return
        moving = StreamedSwap(leaving, coming)
        try:
            with moving:
                yield
        finally:
            if moving.moved:  # the active expert is no longer complete, and the next one not yet
                self._active, self._coming = None, name
                leaving.park()
                self.switches.followed_bytes += moving.brought_bytes

    def count_waits(self) -> None:
        """Add the waits completed by now to `switches`."""
        self.switches.waited_ms += self._waits.take_ms()

    def prepare(self, name: ExpertName) -> PreparedExpert:
        """Start copying an expert ahead of its turn, if there is room for both."""
        if self._known(name) in (self._active, self._coming):
            return PreparedExpert(True, "already there or on its way")
        if self._coming is not None:
            return PreparedExpert(False, f"{self._coming} is on its way")
        needed = self._parking[name].bytes
        room = self._room_left() - self._spare
        if needed > room:
            found = f"{format_bytes(needed)} needed, {format_bytes(max(0, room))} free"
            return PreparedExpert(False, f"no room beside the active expert: {found}; it is copied when its turn comes")
        try:
            self._parking[name].start()
        except torch.OutOfMemoryError:
            self._parking[name].park()  # release the parts that were already allocated
            return PreparedExpert(
                False, "no contiguous room beside the active expert; it is copied when its turn comes"
            )
        self._coming = name
        return PreparedExpert(True, "room for both: copied ahead of its turn")

    def _room_left(self) -> int:
        # Pages of parked experts may still occupy the device. The room depends on how many bytes could be such pages.
        managed = {name: parking.managed for name, parking in self._parking.items()}
        on_device = sum(managed[name] for name in (self._active, self._coming) if name is not None)
        return self._room(on_device=on_device, elsewhere=sum(managed.values()) - on_device)

    def _known(self, name: ExpertName) -> ExpertName:
        if name not in self._experts:
            raise KeyError(f"no expert {name!r}; expected one of {[*self._experts]}")
        return name
