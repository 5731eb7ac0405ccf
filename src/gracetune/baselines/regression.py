"""Decide whether the later of two baselines is slower or uses more memory. Order statistics separate noise. Pure.

Both runs did the same work at the same step, so we take the ratio of their times step by step and report its median.
Each ratio lies below the true median with probability 1/2, so order statistics bound the median with a known confidence
for any distribution of noise. A regression is a bound beyond the tolerance. (A signed-rank test detected fewer 10 %
slowdowns at 2 % noise and 20 steps, and more at 5 % noise and 50 steps. We kept the simpler method.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from statistics import median
from typing import Any, Literal

from gracetune.baselines.baseline import Baseline, config_differences
from gracetune.telemetry.errors import TelemetryError

CONFIDENCE = 0.975
"""Probability that the true ratio is not below the lower bound; the same for the upper bound."""
BLOCKS = 10
"""Blocks of consecutive steps for throughput. A stall that hits only few steps still shows in most blocks."""
HOST_NOISE_BYTES = 32 << 20
"""Differences in process size between equal runs: libraries, threads, the allocator."""
Verdict = Literal["regression", "unclear", "within", "better", "not judged"]
Unit = Literal["ms", "samples/s", "bytes", "s", "x probe", "samples/probe", ""]
Measured = Mapping[int, tuple[float, int]]
"""Step number -> (milliseconds, samples)."""


@dataclass(frozen=True)
class ComparisonRow:
    name: str
    unit: Unit
    before: float
    after: float
    ratio: float | None
    """after / before; None if `before` is 0."""
    low: float | None
    high: float | None
    """The true ratio lies between `low` and `high`; None if unknown."""
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    rows: tuple[ComparisonRow, ...]
    relative: bool
    """Whether times are in units of each machine's own probe."""
    tolerance: float
    notes: tuple[str, ...]

    @property
    def regressions(self) -> tuple[ComparisonRow, ...]:
        return tuple(row for row in self.rows if row.verdict == "regression")

    @property
    def unclear(self) -> tuple[ComparisonRow, ...]:
        return tuple(row for row in self.rows if row.verdict == "unclear")

    def as_json(self) -> dict[str, Any]:
        return {
            "regression": bool(self.regressions),
            "unclear": bool(self.unclear),
            "tolerance": self.tolerance,
            "compared_as": "ratios to each machine's probe" if self.relative else "measured values",
            "rows": [asdict(row) for row in self.rows],
            "notes": list(self.notes),
        }


# -- statistics --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """A median and its confidence bounds; None if there are too few values."""

    middle: float
    low: float | None
    high: float | None


Units = tuple[Bounds, Bounds]
"""The units of the times before and after."""
_AS_MEASURED = Bounds(1.0, 1.0, 1.0)


def bounds_of(values: Sequence[float]) -> Bounds:
    """The median and its bounds, each with CONFIDENCE. Fewer than 6 values give no bounds."""
    ordered, rank = sorted(values), bounding_rank(len(values))
    if rank is None:
        return Bounds(median(ordered), None, None)
    return Bounds(median(ordered), ordered[rank], ordered[-1 - rank])


def bounding_rank(count: int) -> int | None:
    """The largest k for which P(Binomial(count, 1/2) <= k) is at most 1 - CONFIDENCE; None if there is none."""
    limit, at_most, rank = Fraction(1000 - round(1000 * CONFIDENCE), 1000) * 2**count, 1, -1
    while at_most <= limit:
        rank += 1
        at_most += math.comb(count, rank + 1)
    return rank if rank >= 0 else None


def judge(ratio: Bounds, tolerance: float) -> tuple[Verdict, str]:
    """The verdict on the ratio of a cost, where more is worse."""
    if ratio.low is None or ratio.high is None:
        return "unclear", "too few steps in common: capture more (--steps)"
    if ratio.low > 1 + tolerance:
        return "regression", f"{ratio.low - 1:+.1%} at least"
    if ratio.middle > 1 + tolerance:
        return "unclear", _noisy(ratio.low, ratio.high)
    if ratio.high < 1 - tolerance:
        return "better", f"{ratio.high - 1:+.1%} at most"
    return "within", _between(ratio.low, ratio.high) if ratio.high > 1 + tolerance else ""


def _noisy(low: float, high: float) -> str:
    return f"too noisy: {_between(low, high)}; capture more (--steps)"


def _between(low: float, high: float) -> str:
    return f"between {low - 1:+.1%} and {high - 1:+.1%}"


def parse_tolerance(text: str) -> float:
    """Parse `5%` or `0.05`, or raise TelemetryError."""
    stripped = text.strip()
    percent = stripped.endswith("%")
    try:
        value = float(stripped.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise TelemetryError(
            "--tolerance", found=text, expected="a share of at least 0 and under 100 %", hint="--tolerance 5%"
        )
    return value


# -- two baselines -----------------------------------------------------------------------------------------------------


def compare(before: Baseline, after: Baseline, tolerance: float, *, allow_other_config: bool = False) -> Comparison:
    """Compare two baselines. TelemetryError if they are not comparable."""
    notes = _config_notes(before, after, allowed=allow_other_config)
    if before.device != after.device or before.probe.what != after.probe.what:
        raise TelemetryError(
            "two baselines that have no measure in common",
            found=f"{before.device} ({before.probe.what}) and {after.device} ({after.probe.what})",
            expected="both trained on the same kind of device, with the same probe",
            hint="capture one of them again, with this release, on the other's kind of device",
        )
    other_hardware = before.hardware.differences(after.hardware)
    relative = bool(other_hardware)
    if relative:
        notes += [
            f"the machines differ ({'; '.join(other_hardware)}): times are compared in units of each machine's own "
            f"probe ({before.probe.what}); process memory is not judged"
        ]
    notes += _version_notes(before, after) + _probe_notes(before, after, tolerance, relative=relative)
    rows = (
        *_time_rows(before, after, tolerance, relative=relative),
        *_memory_rows(before, after, tolerance, other_machine=relative),
        *_information_rows(before, after),
    )
    return Comparison(rows, relative, tolerance, tuple(notes))


def _config_notes(before: Baseline, after: Baseline, *, allowed: bool) -> list[str]:
    if before.config_fingerprint == after.config_fingerprint:
        return []
    differences = config_differences(before.config, after.config) or ("the fingerprints alone",)
    shown = "; ".join(differences[:6]) + (f"; and {len(differences) - 6} more" if len(differences) > 6 else "")
    if not allowed:
        raise TelemetryError(
            "two baselines of different configurations",
            found=shown,
            expected="the same configuration, so that a difference is one of speed",
            hint="--allow-other-config compares them all the same",
        )
    return [f"the configurations differ: {shown}"]


def _version_notes(before: Baseline, after: Baseline) -> list[str]:
    changed = config_differences(before.versions, after.versions)
    notes = [f"versions differ: {'; '.join(changed)}"] if changed else []
    variables = config_differences(before.environment, after.environment)
    return notes + ([f"variables differ: {'; '.join(variables)}"] if variables else [])


def _probe_notes(before: Baseline, after: Baseline, tolerance: float, *, relative: bool) -> list[str]:
    ratio = after.gemm_ms / before.gemm_ms
    if relative or abs(ratio - 1) <= tolerance:
        return []
    return [
        f"the machine itself was not the same: its probe took {ratio - 1:+.1%}. Look for other work on it, power or "
        "heat limits, before blaming a change"
    ]


def _time_rows(before: Baseline, after: Baseline, tolerance: float, *, relative: bool) -> list[ComparisonRow]:
    one, two = _by_step(before), _by_step(after)
    common = sorted(one.keys() & two.keys())
    if not common:
        raise TelemetryError(
            "two baselines without a step in common",
            found=f"steps after {before.steps.warm_up} and after {after.steps.warm_up}",
            expected="the same --steps in both",
            hint="capture one of them again with the other's --steps",
        )
    units = (_unit(before.probe.gemm_ms), _unit(after.probe.gemm_ms)) if relative else (_AS_MEASURED, _AS_MEASURED)
    return [_step_row(one, two, common, units, tolerance), _throughput_row(one, two, common, units, tolerance)]


def _unit(probe: Sequence[float]) -> Bounds:
    """The median probe time with its bounds; few values are bounded by their range."""
    found = bounds_of(probe)
    return found if found.low is not None else Bounds(found.middle, min(probe), max(probe))


def _in_units(ratio: Bounds, units: Units) -> Bounds:
    """The ratio after dividing each time by its machine's unit, with the bounds widened by the units' own noise."""
    one, two = units
    low, high = (
        None if bound is None or mine is None or theirs is None else bound * mine / theirs
        for bound, mine, theirs in ((ratio.low, one.low, two.high), (ratio.high, one.high, two.low))
    )
    return Bounds(ratio.middle * one.middle / two.middle, low, high)


def _by_step(baseline: Baseline) -> Measured:
    steps = baseline.steps
    return dict(enumerate(zip(steps.ms, steps.samples, strict=True), steps.warm_up + 1))


def _step_row(one: Measured, two: Measured, steps: Sequence[int], units: Units, tolerance: float) -> ComparisonRow:
    ratio = _in_units(bounds_of([two[step][0] / one[step][0] for step in steps]), units)
    before, after = (
        median(each[step][0] for step in steps) / unit.middle for each, unit in zip((one, two), units, strict=True)
    )
    unit: Unit = "ms" if units == (_AS_MEASURED, _AS_MEASURED) else "x probe"
    return ComparisonRow(
        "step time", unit, before, after, ratio.middle, ratio.low, ratio.high, *judge(ratio, tolerance)
    )


def _throughput_row(
    one: Measured, two: Measured, steps: Sequence[int], units: Units, tolerance: float
) -> ComparisonRow:
    """Judged by the time per sample, and shown as throughput."""
    costs = zip(_block_costs(one, steps), _block_costs(two, steps), strict=True)
    cost = _in_units(bounds_of([later / earlier for earlier, later in costs]), units)
    speed = Bounds(1 / cost.middle, _inverse(cost.high), _inverse(cost.low))
    before, after = (_rate(each, steps) * unit.middle for each, unit in zip((one, two), units, strict=True))
    verdict = _as_gain(judge(cost, tolerance), speed)
    if units == (_AS_MEASURED, _AS_MEASURED):
        return ComparisonRow("throughput", "samples/s", before, after, speed.middle, speed.low, speed.high, *verdict)
    return ComparisonRow(
        "throughput", "samples/probe", before / 1000, after / 1000, speed.middle, speed.low, speed.high, *verdict
    )


def _block_costs(measured: Measured, steps: Sequence[int]) -> list[float]:
    """Milliseconds per sample, in blocks of consecutive steps."""
    size = max(1, len(steps) // BLOCKS)
    blocks = [steps[begin : begin + size] for begin in range(0, len(steps) - size + 1, size)]
    return [sum(measured[step][0] for step in block) / sum(measured[step][1] for step in block) for block in blocks]


def _rate(measured: Measured, steps: Sequence[int]) -> float:
    return 1000 * sum(measured[step][1] for step in steps) / sum(measured[step][0] for step in steps)


def _inverse(value: float | None) -> float | None:
    return None if value is None else 1 / value


def _as_gain(verdict: tuple[Verdict, str], speed: Bounds) -> tuple[Verdict, str]:
    """The verdict on a cost, reworded as a gain."""
    if speed.low is None or speed.high is None:
        return verdict
    if verdict[0] == "regression":
        return verdict[0], f"{speed.high - 1:+.1%} at best"
    if verdict[0] == "unclear":
        return verdict[0], _noisy(speed.low, speed.high)
    if verdict[0] == "within":
        return verdict[0], _between(speed.low, speed.high) if verdict[1] else ""
    return verdict[0], f"{speed.low - 1:+.1%} at least"


def _memory_rows(before: Baseline, after: Baseline, tolerance: float, *, other_machine: bool) -> list[ComparisonRow]:
    one, two = before.memory.peak_bytes, after.memory.peak_bytes
    return [
        _memory_row(tier, one.get(tier, 0), two.get(tier, 0), tolerance, judged=tier != "host" or not other_machine)
        for tier in sorted({*one, *two})
    ]


def _memory_row(tier: str, before: int, after: int, tolerance: float, *, judged: bool) -> ComparisonRow:
    ratio = after / before if before else None
    noise = HOST_NOISE_BYTES if tier == "host" else 0
    more = after > before * (1 + tolerance) and after - before > noise
    less = after < before * (1 - tolerance) and before - after > noise
    verdict: Verdict = "regression" if more else "better" if less else "within"
    reason = f"{after - before:+,} bytes" if more or less else ""
    if not judged:
        verdict, reason = "not judged", "another machine"
    return ComparisonRow(f"peak memory, {tier}", "bytes", before, after, ratio, ratio, ratio, verdict, reason)


def _information_rows(before: Baseline, after: Baseline) -> list[ComparisonRow]:
    """Rows for information only: they depend on caches and disks and are not judged."""
    experts = sorted(before.final_losses.keys() & after.final_losses.keys())
    last = f"at steps {_last(before)} and {_last(after)}" if _last(before) != _last(after) else ""
    return [
        _information_row("waiting for data", "ms", _wait(before), _wait(after)),
        _information_row("first batch, once", "s", before.compile_s, after.compile_s),
        _information_row("probe", "ms", before.gemm_ms, after.gemm_ms),
        *(
            _information_row(
                f"final loss {expert}".strip(), "", before.final_losses[expert], after.final_losses[expert], last
            )
            for expert in experts
        ),
    ]


def _wait(baseline: Baseline) -> float:
    waits = baseline.steps.data_wait_ms
    return sum(waits) / len(waits)


def _last(baseline: Baseline) -> int:
    return baseline.steps.warm_up + len(baseline.steps.ms)


def _information_row(name: str, unit: Unit, before: float, after: float, reason: str = "") -> ComparisonRow:
    return ComparisonRow(
        name, unit, before, after, after / before if before else None, None, None, "not judged", reason
    )
