"""The two-stage governor: stage 1, everything fits; stage 2, something spills or is about to.

`decide` is pure. It goes by what the sensors say now, and remembers only what hysteresis needs, so that an
`empty_cache()` or another process's allocation at any moment cannot leave a wrong stage behind. The governor samples
at step boundaries, carries out what was decided, and stops the run with MemoryPressure before the kernel's OOM killer
would.

    1 -> 2  the arena is in use, or less than the floor is available on the device. At once, with a light reclamation.
    2 -> 1  the arena is idle and more than floor + band is available, three samples in a row.
    in 2    main memory under its reserve, or the arena larger than it has been since stage 2 began: hard reclamation.
            Main memory still under its reserve after that: MemoryPressure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from gracetune.config.memory_options import MemoryOptions
from gracetune.errors import ConfigError, Problem
from gracetune.memory.errors import MemoryPressure
from gracetune.memory.sensors import Reading
from gracetune.units import format_bytes

Stage = Literal[1, 2]


class Action(Enum):
    LIGHT_RECLAMATION = "light reclamation"
    HARD_RECLAMATION = "hard reclamation"


@dataclass(frozen=True)
class Limits:
    """Where pressure begins, where it ends, and how much of main memory is nobody's."""

    threshold: float
    min_bytes: int
    host_reserve: int
    band: float = 0.05
    """Of the total; inside it nothing moves."""
    calm_samples: int = 3

    @classmethod
    def from_options(cls, options: MemoryOptions, *, host_reserve: int) -> Limits:
        return cls(options.uvm_stage1_threshold, options.uvm_stage1_min_bytes, host_reserve)

    def floor(self, total: int) -> int:
        # At least one byte: a device with nothing at all available is under pressure whatever its total.
        return max(int(self.threshold * total), self.min_bytes, 1)

    def calm_level(self, total: int) -> int:
        """More than this must be available before stage 2 can end."""
        return self.floor(total) + int(self.band * total)

    def problem(self, total: int) -> Problem | None:
        """Limits that no state of the device could ever satisfy."""
        level = self.calm_level(total)
        if level < total:
            return None
        larger = "uvm_stage1_min_bytes" if self.min_bytes > int(self.threshold * total) else "uvm_stage1_threshold"
        value = format_bytes(self.min_bytes) if larger == "uvm_stage1_min_bytes" else str(self.threshold)
        return Problem(
            key=f"memory.{larger}",
            found=f"{value}: stage 1 would need more than {format_bytes(level)} available, the GPU has "
            f"{format_bytes(total)} for this process",
            expected=f"a floor that leaves {self.band:.0%} of the GPU's memory above it",
            hint="--set memory.uvm_stage1_threshold=0.10 --set memory.uvm_stage1_min_bytes=0",
        )


@dataclass(frozen=True)
class State:
    """All the governor remembers from one sample to the next."""

    stage: Stage = 1
    calm: int = 0
    """Calm samples in a row; always 0 in stage 1."""
    arena_high: int = 0
    """The most the arena held since stage 2 began; always 0 in stage 1. The most, not the last: active bytes go up
    and down with every batch, and a hard reclamation stops the GPU."""


@dataclass(frozen=True)
class Decision:
    state: State
    actions: tuple[Action, ...]
    reason: str
    unknown: tuple[str, ...] = ()
    """What could not be read. Unknown is neither pressure nor calm."""


@dataclass(frozen=True)
class StageChange:
    """The memory stage is another one."""

    before: Stage
    after: Stage
    reason: str


@dataclass(frozen=True)
class ArenaChange:
    """The overflow arena is used, holds more than ever before, or is empty again."""

    before: int
    after: int
    """Bytes: the most it held between two samples."""
    reason: str


@dataclass(frozen=True)
class Reclamation:
    """A reclamation was carried out."""

    action: Action
    released: int | None
    """Bytes of GPU memory that went back to the driver; None: unknown."""
    demoted: int | None
    """Bytes of managed buffers that were sent to main memory; None: unknown."""
    milliseconds: float
    reason: str


MemoryChange = StageChange | ArenaChange | Reclamation
OnChange = Callable[[MemoryChange], None]


def decide(state: State, reading: Reading, limits: Limits) -> Decision:
    if state.stage == 1:
        return _in_stage_1(state, reading, limits)
    return _in_stage_2(state, reading, limits)


def _in_stage_1(state: State, reading: Reading, limits: Limits) -> Decision:
    pressure = _pressure(reading, limits)
    if pressure is None:
        return Decision(state, (), f"stage 1: {_seen(reading)}", reading.unknown)
    actions, reason = [Action.LIGHT_RECLAMATION], f"stage 1 -> 2: {pressure}"
    shortage = _shortage(reading, limits)
    if shortage is not None:
        actions.append(Action.HARD_RECLAMATION)
        reason = f"{reason}; {shortage}"
    return Decision(State(stage=2, arena_high=reading.arena_active or 0), tuple(actions), reason, reading.unknown)


def _in_stage_2(state: State, reading: Reading, limits: Limits) -> Decision:
    calm = state.calm + 1 if _is_calm(reading, limits) else 0
    if calm >= limits.calm_samples:
        reason = f"stage 2 -> 1: calm for {calm} samples; {_seen(reading)}"
        return Decision(State(), (), reason, reading.unknown)
    now = State(stage=2, calm=calm, arena_high=max(state.arena_high, reading.arena_active or 0))
    causes = [cause for cause in (_shortage(reading, limits), _growth(state, reading)) if cause is not None]
    if causes:
        return Decision(now, (Action.HARD_RECLAMATION,), f"stage 2: {'; '.join(causes)}", reading.unknown)
    waiting = f"calm for {calm} of {limits.calm_samples} samples; " if calm else ""
    return Decision(now, (), f"stage 2: {waiting}{_seen(reading)}", reading.unknown)


def _pressure(reading: Reading, limits: Limits) -> str | None:
    if reading.arena_active:
        return f"the overflow arena holds {format_bytes(reading.arena_active)}"
    device = reading.device
    if device is not None and device.available < limits.floor(device.total):
        floor = format_bytes(limits.floor(device.total))
        return f"{format_bytes(device.available)} available on the device, the floor is {floor}"
    return None


def _is_calm(reading: Reading, limits: Limits) -> bool:
    device = reading.device
    return reading.arena_active == 0 and device is not None and device.available > limits.calm_level(device.total)


def _shortage(reading: Reading, limits: Limits) -> str | None:
    headroom = reading.host_headroom
    if headroom is None or headroom >= limits.host_reserve:
        return None
    return f"{format_bytes(headroom)} of main memory left, the reserve is {format_bytes(limits.host_reserve)}"


def _growth(state: State, reading: Reading) -> str | None:
    if reading.arena_active is None or reading.arena_active <= state.arena_high:
        return None
    return f"the arena grew from {format_bytes(state.arena_high)} to {format_bytes(reading.arena_active)}"


def _seen(reading: Reading) -> str:
    device, arena = reading.device, reading.arena_active
    available = "unknown" if device is None else f"{format_bytes(device.available)} of {format_bytes(device.total)}"
    held = "unknown" if arena is None else format_bytes(arena)
    return f"device available {available}, arena {held}"


def demotion_budget(reading: Reading, limits: Limits) -> int:
    """How much may move from the device into main memory: half of what is there above the reserve.

    Half, so that a demotion never causes the very shortage it is part of the answer to.
    """
    return 0 if reading.host_headroom is None else max(0, reading.host_headroom - limits.host_reserve) // 2


class Reclaimer(Protocol):
    """What a reclamation can do. Called from the training thread at a step boundary."""

    def synchronize(self) -> None: ...

    def release_device_cache(self) -> int | None:
        """Garbage first, then the blocks torch keeps for later. Returns the bytes given back; None: unknown."""
        ...

    def release_host_caches(self) -> None:
        """Pinned blocks torch keeps for later, and what the C library holds."""
        ...

    def demote_cold(self, *, at_most: int, everything: bool) -> int | None:
        """Send managed buffers nobody is about to use to main memory; `everything`: the recently used ones too.

        Returns the bytes sent; None: unknown.
        """
        ...


class SensorSource(Protocol):
    def read(self) -> Reading: ...


@dataclass(frozen=True)
class Counters:
    """They only ever grow."""

    transitions: int = 0
    light_reclamations: int = 0
    hard_reclamations: int = 0
    arena_peak: int = 0
    """The most the arena held at a step boundary."""

    def after(self, before: State, reading: Reading, decision: Decision) -> Counters:
        return Counters(
            transitions=self.transitions + (before.stage != decision.state.stage),
            light_reclamations=self.light_reclamations + decision.actions.count(Action.LIGHT_RECLAMATION),
            hard_reclamations=self.hard_reclamations + decision.actions.count(Action.HARD_RECLAMATION),
            arena_peak=max(self.arena_peak, reading.arena_active or 0),
        )


class Governor:
    """Samples, decides, acts. Lives in the training thread; `state` and `counters` may be read from any.

    `on_change` gets every change when it happens: the arena's use, then the stage, then each reclamation once it is
    done. It is called before a MemoryPressure is raised.
    """

    def __init__(
        self, sensors: SensorSource, reclaimer: Reclaimer, limits: Limits, on_change: OnChange = lambda change: None
    ) -> None:
        self._sensors = sensors
        self._reclaimer = reclaimer
        self._limits = limits
        self._checked = False
        self._arena = 0
        """What the last sample that could read it found in the arena."""
        self.on_change = on_change
        self.state = State()
        self.counters = Counters()

    def sample(self) -> Decision:
        """Once per step boundary. Raises MemoryPressure when nothing is left to give up."""
        reading = self._sensors.read()
        self._check_limits_once(reading)
        before, peak = self.state, self.counters.arena_peak
        decision = decide(before, reading, self._limits)
        self.counters = self.counters.after(before, reading, decision)
        self.state = decision.state
        self._report_arena(reading, peak)
        if before.stage != decision.state.stage:
            self.on_change(StageChange(before.stage, decision.state.stage, decision.reason))
        for action in decision.actions:
            self.on_change(self._carry_out(action, demotion_budget(reading, self._limits), decision.reason))
        if Action.HARD_RECLAMATION in decision.actions:
            self._raise_if_still_short(self._sensors.read())
        return decision

    def _check_limits_once(self, reading: Reading) -> None:
        if self._checked or reading.device is None:
            return
        problem = self._limits.problem(reading.device.total)
        if problem is not None:
            raise ConfigError([problem])
        self._checked = True

    def _report_arena(self, reading: Reading, peak: int) -> None:
        if reading.arena_active is None:
            return
        before, self._arena = self._arena, reading.arena_active
        if self._arena > peak:
            reason = "it holds more than ever before" if peak else "a step needed more than the device has"
        elif self._arena and not before:
            reason = "a step needed more than the device has, again"
        elif before and not self._arena:
            reason = "the last step needed none of it"
        else:
            return
        self.on_change(ArenaChange(before, self._arena, reason))

    def _carry_out(self, action: Action, budget: int, reason: str) -> Reclamation:
        hard, began = action is Action.HARD_RECLAMATION, time.perf_counter()
        if hard:
            self._reclaimer.synchronize()
        released = self._reclaimer.release_device_cache()
        if hard:
            self._reclaimer.release_host_caches()
        demoted = self._reclaimer.demote_cold(at_most=budget, everything=hard)
        return Reclamation(action, released, demoted, 1000 * (time.perf_counter() - began), reason)

    def _raise_if_still_short(self, reading: Reading) -> None:
        if _shortage(reading, self._limits) is None or reading.host_headroom is None:
            return
        raise MemoryPressure(
            headroom=reading.host_headroom, reserve=self._limits.host_reserve, arena_active=reading.arena_active
        )
