"""The values of all `StepDone` and `MemorySampled` events of a run, as compact columns.

A long run has hundreds of thousands of these events. The report keeps only a few of them whole. They are selected like
the points of a plot (`curves.decimated_indices`): the first, the last, and the extremes of each interval of every
curve.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from gracetune.telemetry.curves import Point, decimated_indices
from gracetune.telemetry.events import MemorySampled, StepDone


class _Curve:
    """The values of one curve, each with the position of its event."""

    def __init__(self) -> None:
        self.positions, self.values = array("q"), array("d")

    def add(self, position: int, value: float) -> None:
        self.positions.append(position)
        self.values.append(value)

    def kept(self) -> Iterator[int]:
        return (self.positions[index] for index in decimated_indices(self.values))


class StepColumns:
    """Columns of every valid `StepDone`."""

    def __init__(self) -> None:
        self.begins = array("q")
        """Byte offsets of their lines in the log."""
        self._steps = array("q")
        self._batches = array("d")  # not "q": in a damaged log the product may exceed 64 bits
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
        """Experts in the order in which they were first trained."""
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
        """Samples of one process in an optimizer step."""
        return [*zip(self._steps, self._batches, strict=True)]

    @property
    def data_wait_share(self) -> float | None:
        return self._waited_ms / self._spent_ms if self._spent_ms > 0 else None

    def kept(self) -> list[int]:
        """Byte offsets of the lines whose events are kept whole."""
        curves = (*self._losses.values(), *self._rates.values(), self._step_ms, self._data_wait_ms, self._norms)
        return _chosen(curves, self.begins)

    def _points(self, curve: _Curve) -> tuple[Point, ...]:
        """(step, value) of each event."""
        return tuple(
            [(self._steps[position], value) for position, value in zip(curve.positions, curve.values, strict=True)]
        )


class MemoryColumns:
    """Columns of every valid `MemorySampled`."""

    def __init__(self) -> None:
        self._begins = array("q")
        self._used: defaultdict[tuple[str, str], _Curve] = defaultdict(_Curve)
        self._memory_stages = _Curve()
        self.peaks: dict[str, dict[str, int]] = {}
        """Tier -> owner -> peak bytes; `total` is the peak of the sum over all owners."""
        self.highest: dict[str, float] = {}
        """Counter -> highest value."""

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
    if begins:  # always keep the first and the last event
        positions |= {0, len(begins) - 1}
    return [begins[position] for position in sorted(positions)]
