"""The memory governor. In stage 1 everything fits; in stage 2 memory spills or is about to.

`decide` is pure. It uses the current sensor values and keeps only the state that hysteresis needs, so an
`empty_cache()` or an allocation of another process cannot leave a wrong stage behind. The governor samples at step
boundaries, carries out the decisions, and stops the run with MemoryPressure before the kernel's OOM killer would.

    1 -> 2  The arena is in use, or less than the floor is available on the device. Immediate, with light reclamation.
    2 -> 1  The arena is idle and more than floor + band is available, for three consecutive samples.
    in 1    A shortage of main memory alone has no effect; the watchdog stops the run at `host_floor`.
    in 2    Main memory is below its reserve, or the arena reached a new maximum of this stage: hard reclamation.
            Buffers are demoted only into main memory above its reserve: none while it is short.
            If main memory is still below its reserve after that: MemoryPressure.

A light reclamation frees torch's cached GPU memory and demotes cold managed buffers. A hard one also waits for the GPU,
frees cached host memory, and demotes recently used buffers too.
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
from gracetune.memory.sensors import MemoryReading
from gracetune.units import format_bytes

MemoryStage = Literal[1, 2]


class Action(Enum):
    LIGHT_RECLAMATION = "light reclamation"
    HARD_RECLAMATION = "hard reclamation"


@dataclass(frozen=True)
class PressureLimits:
    """The levels at which pressure begins and ends, and the reserve of main memory."""

    threshold: float
    """The floor as a fraction of the GPU's memory."""
    min_bytes: int
    """The floor is at least this."""
    host_reserve: int
    band: float = 0.05
    """Fraction of the total. Between floor and floor + band the stage does not change."""
    calm_samples: int = 3

    @classmethod
    def from_options(cls, options: MemoryOptions, *, host_reserve: int) -> PressureLimits:
        return cls(options.uvm_stage1_threshold, options.uvm_stage1_min_bytes, host_reserve)

    def floor(self, total: int) -> int:
        """Less than this on the device is pressure."""
        # At least one byte, so that a device without any available memory is always under pressure.
        return max(int(self.threshold * total), self.min_bytes, 1)

    def calm_level(self, total: int) -> int:
        """More than this must be available before stage 2 can end."""
        return self.floor(total) + int(self.band * total)

    def problem(self, total: int) -> Problem | None:
        """The problem, if stage 1 could never be reached again with these limits."""
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
class GovernorState:
    """The state that the governor keeps between samples."""

    stage: MemoryStage = 1
    calm: int = 0
    """Number of consecutive calm samples; always 0 in stage 1."""
    arena_high: int = 0
    """The maximum use of the arena since stage 2 began; 0 in stage 1. Growth is measured against the maximum, because
    the use changes with every batch and each hard reclamation stalls the GPU."""


@dataclass(frozen=True)
class Decision:
    """The next state and the actions to take, with the reason."""

    state: GovernorState
    actions: tuple[Action, ...]
    reason: str
    unknown: tuple[str, ...] = ()
    """Values that could not be read. An unknown value is neither pressure nor calm."""


@dataclass(frozen=True)
class MemoryStageChange:
    """The memory stage has changed."""

    before: MemoryStage
    after: MemoryStage
    reason: str


@dataclass(frozen=True)
class ArenaChange:
    """The overflow arena came into use, reached a new maximum, or became empty."""

    before: int
    after: int
    """Both in bytes: the maximum use between two samples."""
    reason: str


@dataclass(frozen=True)
class Reclamation:
    """A reclamation was carried out."""

    action: Action
    released: int | None
    """Bytes of GPU memory returned to the driver; None if unknown."""
    demoted: int | None
    """Bytes of managed buffers migrated to main memory; None if unknown."""
    milliseconds: float
    reason: str


MemoryChange = MemoryStageChange | ArenaChange | Reclamation
OnChange = Callable[[MemoryChange], None]


def decide(state: GovernorState, reading: MemoryReading, limits: PressureLimits) -> Decision:
    """The next state and actions; see the top of this file."""
    if state.stage == 1:
        return _in_stage_1(state, reading, limits)
    return _in_stage_2(state, reading, limits)


def _in_stage_1(state: GovernorState, reading: MemoryReading, limits: PressureLimits) -> Decision:
    pressure = _pressure(reading, limits)
    if pressure is None:
        return Decision(state, (), f"stage 1: {_seen(reading)}", reading.unknown)
    actions, reason = [Action.LIGHT_RECLAMATION], f"stage 1 -> 2: {pressure}"
    shortage = _shortage(reading, limits)
    if shortage is not None:
        actions.append(Action.HARD_RECLAMATION)
        reason = f"{reason}; {shortage}"
    return Decision(
        GovernorState(stage=2, arena_high=reading.arena_active or 0), tuple(actions), reason, reading.unknown
    )


def _in_stage_2(state: GovernorState, reading: MemoryReading, limits: PressureLimits) -> Decision:
    calm = state.calm + 1 if _is_calm(reading, limits) else 0
    if calm >= limits.calm_samples:
        reason = f"stage 2 -> 1: calm for {calm} samples; {_seen(reading)}"
        return Decision(GovernorState(), (), reason, reading.unknown)
    now = GovernorState(stage=2, calm=calm, arena_high=max(state.arena_high, reading.arena_active or 0))
    causes = [cause for cause in (_shortage(reading, limits), _growth(state, reading)) if cause is not None]
    if causes:
        return Decision(now, (Action.HARD_RECLAMATION,), f"stage 2: {'; '.join(causes)}", reading.unknown)
    waiting = f"calm for {calm} of {limits.calm_samples} samples; " if calm else ""
    return Decision(now, (), f"stage 2: {waiting}{_seen(reading)}", reading.unknown)


def _pressure(reading: MemoryReading, limits: PressureLimits) -> str | None:
    """Why GPU memory is under pressure; None if it is not."""
    if reading.arena_active:
        return f"the overflow arena holds {format_bytes(reading.arena_active)}"
    device = reading.device
    if device is not None and device.available < limits.floor(device.total):
        floor = format_bytes(limits.floor(device.total))
        return f"{format_bytes(device.available)} available on the device, the floor is {floor}"
    return None


def _is_calm(reading: MemoryReading, limits: PressureLimits) -> bool:
    device = reading.device
    return reading.arena_active == 0 and device is not None and device.available > limits.calm_level(device.total)


def _shortage(reading: MemoryReading, limits: PressureLimits) -> str | None:
    """Why main memory is short; None if it is not."""
    headroom = reading.host_headroom
    if headroom is None or headroom >= limits.host_reserve:
        return None
    return f"{format_bytes(headroom)} of main memory left, the reserve is {format_bytes(limits.host_reserve)}"


def _growth(state: GovernorState, reading: MemoryReading) -> str | None:
    """A new maximum of the arena's use, in words; None if there is none."""
    if reading.arena_active is None or reading.arena_active <= state.arena_high:
        return None
    return f"the arena grew from {format_bytes(state.arena_high)} to {format_bytes(reading.arena_active)}"


def _seen(reading: MemoryReading) -> str:
    device, arena = reading.device, reading.arena_active
    available = "unknown" if device is None else f"{format_bytes(device.available)} of {format_bytes(device.total)}"
    held = "unknown" if arena is None else format_bytes(arena)
    return f"device available {available}, arena {held}"


def demotion_budget(reading: MemoryReading, limits: PressureLimits) -> int:
    """Bytes that may migrate from the device to main memory: half of the headroom above the reserve.

    Only half, so that the migration does not itself cause a shortage of main memory.
    """
    return 0 if reading.host_headroom is None else max(0, reading.host_headroom - limits.host_reserve) // 2


class Reclaimer(Protocol):
    """The operations of a reclamation. Called from the training thread at a step boundary."""

    def synchronize(self) -> None: ...

    def release_device_cache(self) -> int | None:
        """Collect garbage, then free cached GPU blocks. Returns the bytes freed; None if unknown."""
        ...

    def release_host_caches(self) -> None:
        """Free torch's cached pinned blocks and the C library's free pages."""
        ...

    def demote_cold(self, *, at_most: int, include_recent: bool) -> int | None:
        """Migrate up to `at_most` bytes of cold managed buffers to main memory.

        With `include_recent`, recently used buffers are candidates too; the limit is the same. Returns the bytes
        migrated; None if unknown.
        """
        ...


class SensorSource(Protocol):
    def read(self) -> MemoryReading: ...


@dataclass(frozen=True)
class Counters:
    """Counters that increase monotonically."""

    transitions: int = 0
    light_reclamations: int = 0
    hard_reclamations: int = 0
    arena_peak: int = 0
    """The maximum use of the arena in any sample."""

    def after(self, before: GovernorState, reading: MemoryReading, decision: Decision) -> Counters:
        return Counters(
            transitions=self.transitions + (before.stage != decision.state.stage),
            light_reclamations=self.light_reclamations + decision.actions.count(Action.LIGHT_RECLAMATION),
            hard_reclamations=self.hard_reclamations + decision.actions.count(Action.HARD_RECLAMATION),
            arena_peak=max(self.arena_peak, reading.arena_active or 0),
        )


class Governor:
    """Samples memory, decides and acts. Call it from the training thread; any thread may read `state` and `counters`.

    `on_change` is called for each change: first the arena's use, then the stage, then each finished reclamation. These
    calls come before a MemoryPressure is raised.
    """

    def __init__(
        self,
        sensors: SensorSource,
        reclaimer: Reclaimer,
        limits: PressureLimits,
        on_change: OnChange = lambda change: None,
    ) -> None:
        self._sensors = sensors
        self._reclaimer = reclaimer
        self._limits = limits
        self._checked = False
        self._arena = 0
        """The arena's use at the last sample that could read it."""
        self.on_change = on_change
        self.state = GovernorState()
        self.counters = Counters()

    def sample(self) -> Decision:
        """Sample and act; call this once per step boundary.

        Raises MemoryPressure if main memory is below its reserve even after a hard reclamation.
        """
        reading = self._sensors.read()
        self._check_limits_once(reading)
        before, peak = self.state, self.counters.arena_peak
        decision = decide(before, reading, self._limits)
        self.counters = self.counters.after(before, reading, decision)
        self.state = decision.state
        self._report_arena(reading, peak)
        if before.stage != decision.state.stage:
            self.on_change(MemoryStageChange(before.stage, decision.state.stage, decision.reason))
        for action in decision.actions:
            self.on_change(self._carry_out(action, demotion_budget(reading, self._limits), decision.reason))
        if Action.HARD_RECLAMATION in decision.actions:
            self._raise_if_still_short(self._sensors.read())
        return decision

    def _check_limits_once(self, reading: MemoryReading) -> None:
        if self._checked or reading.device is None:
            return
        problem = self._limits.problem(reading.device.total)
        if problem is not None:
            raise ConfigError([problem])
        self._checked = True

    def _report_arena(self, reading: MemoryReading, peak: int) -> None:
        if reading.arena_active is None:
            return
        before, self._arena = self._arena, reading.arena_active
        if self._arena > peak:
            reason = "it reached a new maximum" if peak else "a step needed more than the device has"
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
        demoted = self._reclaimer.demote_cold(at_most=budget, include_recent=hard)
        return Reclamation(action, released, demoted, 1000 * (time.perf_counter() - began), reason)

    def _raise_if_still_short(self, reading: MemoryReading) -> None:
        if _shortage(reading, self._limits) is None or reading.host_headroom is None:
            return
        raise MemoryPressure(
            headroom=reading.host_headroom, reserve=self._limits.host_reserve, arena_active=reading.arena_active
        )
