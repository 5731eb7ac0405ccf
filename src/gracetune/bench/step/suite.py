"""The rows with the project's targets, measured one after the other in one process."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from gracetune.bench.step.clock import free
from gracetune.bench.step.job import FEWEST_SAMPLES, StepJob
from gracetune.bench.step.measurement import Bench
from gracetune.bench.step.row import StepRow, TargetBar
from gracetune.config.spelling import nearest
from gracetune.errors import ConfigError, GracetuneError, Problem
from gracetune.units import GIB

_LORA: Final = StepJob("wan14b", baseline=True)


@dataclass(frozen=True)
class Task:
    job: StepJob
    bar: TargetBar


WAN14B: Final[Mapping[str, Task]] = MappingProxyType(
    {
        "lora": Task(_LORA, TargetBar(must_ms=470, aim_ms=420, must_ratio=2.1)),
        "lora-45gib": Task(replace(_LORA, memory_limit=45 * GIB), TargetBar(must_ms=530, aim_ms=490)),
        "lokr": Task(replace(_LORA, adapter="lokr"), TargetBar(must_ms=560, aim_ms=470, must_ratio=3.0)),
        "lora-fp8": Task(replace(_LORA, precision="fp8"), TargetBar(must_ms=370, aim_ms=300)),
        "automagic": Task(replace(_LORA, optimizer="automagic"), TargetBar(max_slowdown=0.02, than="lora")),
        "video": Task(replace(_LORA, width=832, height=480, frames=81), TargetBar(must_ratio=1.3, aim_ratio=1.6)),
    }
)
"""Tasks by name, in the order of measurement; the slowest is last."""


def choose_tasks(only: Sequence[str]) -> dict[str, Task]:
    """The named tasks, or all."""
    unknown = [name for name in only if name not in WAN14B]
    if unknown:
        meant = nearest(unknown[0], WAN14B) or next(iter(WAN14B))
        raise ConfigError([Problem("--only", unknown[0], f"of {', '.join(WAN14B)}", f"--only {meant}")])
    return {name: task for name, task in WAN14B.items() if not only or name in only}


def measure_tasks(
    bench: Bench, only: Sequence[str] = (), *, steps: int = FEWEST_SAMPLES, smoke: bool = False
) -> Iterator[StepRow]:
    """Yield each row as soon as it is measured, so that callers can save it before the machine is taken away.

    A row that cannot be measured (no memory, an unsupported kernel) does not stop the others; it is an error at the
    end.
    """
    done: dict[str, StepRow] = {}
    failed: dict[str, str] = {}
    for name, task in choose_tasks(only).items():
        bench.report(f"-- {name}")
        try:
            row = bench.row(replace(task.job, steps=steps, smoke=smoke), name)
        except (GracetuneError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
            bench.report(traceback.format_exc())
            failed[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
        else:
            done[name] = with_verdict(row, task.bar, done)
            yield done[name]
        free(bench.device)
    if failed:
        raise GracetuneError("not measured: " + "; ".join(f"{name}: {why}" for name, why in failed.items()))


def with_verdict(row: StepRow, bar: TargetBar, others: Mapping[str, StepRow]) -> StepRow:
    """`row` with its verdict. Smoke tests get none, nor do bars relative to a row that was not measured."""
    if row.smoke:
        return replace(row, bar=bar.words())
    other = None if bar.than is None else others.get(bar.than)
    verdicts = [
        None if bar.must_ms is None else row.ms_per_step <= bar.must_ms,
        None if bar.must_ratio is None or row.ratio is None else row.ratio >= bar.must_ratio,
        None if bar.max_slowdown is None or other is None
        else row.ms_per_step <= (1 + bar.max_slowdown) * other.ms_per_step,
        None if row.memory_limit_gib is None or row.peak_gib is None else row.peak_gib <= row.memory_limit_gib,
        _close(row),
    ]  # fmt: skip
    known = [verdict for verdict in verdicts if verdict is not None]
    return replace(row, bar=bar.words(), ok=all(known) if known else None)


def _close(row: StepRow) -> bool | None:
    """Whether the estimated peak is within 10 % of the measured one, as required of every row."""
    if row.peak_gib is None or row.estimated_peak_gib is None:
        return None
    return abs(row.estimated_peak_gib / row.peak_gib - 1) <= 0.10
