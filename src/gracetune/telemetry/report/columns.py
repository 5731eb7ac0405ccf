"""The numbers of all log steps and memory samples of a run, as columns: a long run has hundreds of thousands of them.

Whole events are kept of a few only, chosen as the points of a plot are (`curves.kept_places`): of every curve the
first, the last, and in each stretch the lowest and the highest.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from gracetune.telemetry.curves import Point, kept_indices
from gracetune.telemetry.events import MemorySampled, StepDone


class _Curve:
    """Values by the position of their event."""

    def __init__(self) -> None:
        self.positions, self.values = array("q"), array("d")

    def add(self, position: int, value: float) -> None:
        self.positions.append(position)
        self.values.append(value)

    def kept(self) -> Iterator[int]:
        return (self.positions[index] for index in kept_indices(self.values))


class StepColumns:
    """Every `StepDone` that stands."""

    def __init__(self) -> None:
        self.begins = array("q")
        """Where their lines begin in the log."""
        self._steps = array("q")
        self._batches = array("d")  # two numbers of a damaged log may multiply to more than 64 bits
        self._losses: defaultdict[str, _Curve] = defaultdict(_Curve)
        self._rates: defaultdict[str, _Curve] = defaultdict(_Curve)
        self._step_ms, self._data_wait_ms, self._norms = _Curve(), _Curve(), _Curve()
        self._spent_ms = self._waited_ms = 0.0
        self.compile_ms = 0.0
        self.samples = self.epochs = 0
        self.last: StepDone | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, begin: int, event: StepDone) -> None:
        position = len(self._steps)
        self.begins.append(begin)
        self._steps.append(event.step)
        self._batches.append(event.micro_batch * event.accumulation)
        self._losses[event.stage].add(position, event.loss)
        self._step_ms.add(position, event.step_ms)
        self._data_wait_ms.add(position, event.data_wait_ms)
        if event.grad_norm is not None:
            self._norms.add(position, event.grad_norm)
        for group, rate in event.lr.items():
            self._rates[group].add(position, rate)
        self._spent_ms += event.step_ms * event.steps
        self._waited_ms += event.data_wait_ms * event.steps
        self.compile_ms += event.compile_ms
        self.samples, self.epochs = max(self.samples, event.samples), max(self.epochs, event.epoch + 1)
        self.last = event

    @property
    def experts(self) -> tuple[str, ...]:
        """Noise experts in the order they were first trained."""
        return tuple(self._losses)

    @property
    def rate_groups(self) -> tuple[str, ...]:
        return tuple(self._rates)

    def losses(self, expert: str) -> tuple[Point, ...]:
        return self._points(self._losses[expert])

    def rates(self, group: str) -> tuple[Point, ...]:
        return self._points(self._rates[group])

    @property
    def step_ms(self) -> tuple[Point, ...]:
        return self._points(self._step_ms)

    @property
    def data_wait_ms(self) -> tuple[Point, ...]:
        return self._points(self._data_wait_ms)

    @property
    def norms(self) -> tuple[Point, ...]:
        return self._points(self._norms)

    @property
    def batches(self) -> list[Point]:
        """Samples of an optimizer step of one process."""
        return [*zip(self._steps, self._batches, strict=True)]

    @property
    def data_wait_share(self) -> float | None:
        return self._waited_ms / self._spent_ms if self._spent_ms > 0 else None

    def kept(self) -> list[int]:
        """Where the lines of those begin that are kept whole."""
        curves = (*self._losses.values(), *self._rates.values(), self._step_ms, self._data_wait_ms, self._norms)
        return _chosen(curves, self.begins)

    def _points(self, curve: _Curve) -> tuple[Point, ...]:
        return tuple(
            [(self._steps[position], value) for position, value in zip(curve.positions, curve.values, strict=True)]
        )


class MemoryColumns:
    """Every `MemorySampled` that stands."""

    def __init__(self) -> None:
        self._begins = array("q")
        self._used: defaultdict[tuple[str, str], _Curve] = defaultdict(_Curve)
        self._memory_stages = _Curve()
        self.peaks: dict[str, dict[str, int]] = {}
        """Tier -> owner -> the most it held; `total` is the most all held together."""
        self.highest: dict[str, float] = {}
        """Of each counter."""

    def __len__(self) -> int:
        return len(self._begins)

    def add(self, begin: int, event: MemorySampled) -> None:
        position = len(self._begins)
        self._begins.append(begin)
        for tier, owners in event.used_bytes.items():
            known = self.peaks.setdefault(tier, {})
            for owner, used in (*owners.items(), ("total", sum(owners.values()))):
                known[owner] = max(known.get(owner, 0), used)
                self._used[tier, owner].add(position, float(used))
        for name, value in event.counters.items():
            highest = self.highest.get(name, -math.inf)
            self.highest[name] = value if value > highest or math.isnan(highest) else highest
        if "uvm.stage" in event.counters:
            self._memory_stages.add(position, event.counters["uvm.stage"])

    def kept(self) -> list[int]:
        return _chosen((*self._used.values(), self._memory_stages), self._begins)


def _chosen(curves: Iterable[_Curve], begins: Sequence[int]) -> list[int]:
    positions = {position for curve in curves for position in curve.kept()}
    if begins:  # whatever the curves say
        positions |= {0, len(begins) - 1}
    return [begins[position] for position in sorted(positions)]
