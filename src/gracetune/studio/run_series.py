"""The curves of a run, decimated for a screen, and the comparison of several runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gracetune.studio.log_lines import Fields, mapping, number, numbers, text, whole
from gracetune.studio.run_log import RunLog
from gracetune.telemetry.curves import decimated_indices, moving_average

_PARSED_PER_POINT = 4
"""Steps that are parsed for each point that is shown. Of these the lowest and highest of each interval are shown."""
_MOST_SWITCHES = 500
_MOST_GROUPS = 32
Curve = dict[str, list[Any]]


def series(log: RunLog, points: int) -> dict[str, Any]:
    """All curves. `log` is up to date."""
    steps = log.events("StepDone", points * _PARSED_PER_POINT)
    memory = log.events("MemorySampled", points)
    start = log.last("RunStarted")
    experts = list(dict.fromkeys(text(one.get("stage"), 40) for one in steps))[:_MOST_GROUPS]
    world = whole(start.get("world_size")) or 1
    return {
        "steps_total": whole(start.get("total_steps")),
        "loss": {
            expert: _loss([one for one in steps if text(one.get("stage"), 40) == expert], points) for expert in experts
        },
        "held_out": _held_out(log.events("HeldOutLoss")),
        "lr": _by_group(steps, points),
        **{name: _curve(steps, name, points) for name in ("grad_norm", "step_ms", "data_wait_ms")},
        "batch": _decimated([(_step(one), _batch(one, world)) for one in steps], points),
        "memory": _memory(memory),
        "switches": [_switch(one) for one in log.events("StageSwitched", _MOST_SWITCHES)],
        "logged_steps": log.count("StepDone"),
    }


def _step(event: Fields) -> int:
    return whole(event.get("step")) or 0


def _curve(events: Sequence[Fields], name: str, points: int) -> Curve:
    return _decimated([(_step(one), number(one.get(name))) for one in events if one.get(name) is not None], points)


def _decimated(values: Sequence[tuple[int, float | None]], points: int) -> Curve:
    """The curve with at most `points` points. A value that is not finite stays as None: a gap."""
    kept = decimated_indices([math.nan if value is None else value for _, value in values], points)
    return {"step": [values[index][0] for index in kept], "value": [values[index][1] for index in kept]}


def _loss(events: Sequence[Fields], points: int) -> Curve:
    """The loss with its moving average at the same steps."""
    values = [number(one.get("loss")) for one in events]
    finite = [(float(index), value) for index, value in enumerate(values) if value is not None and abs(value) < 1e200]
    averages = {int(index): value for index, value in moving_average(finite)}
    kept = decimated_indices([math.nan if value is None else value for value in values], points)
    return {
        "step": [_step(events[index]) for index in kept],
        "value": [values[index] for index in kept],
        "smoothed": [averages.get(index) for index in kept],
    }


def _held_out(events: Sequence[Fields]) -> dict[str, Curve]:
    found: dict[str, Curve] = {}
    for one in events:
        curve = found.setdefault(text(one.get("stage"), 40), {"step": [], "value": []})
        curve["step"].append(_step(one))
        curve["value"].append(number(one.get("mean")))
    return found


def _by_group(steps: Sequence[Fields], points: int) -> dict[str, Curve]:
    rates = [(_step(one), numbers(one.get("lr"))) for one in steps]
    groups = list(dict.fromkeys(name for _, rate in rates for name in rate))[:_MOST_GROUPS]
    return {
        group: _decimated([(step, rate[group]) for step, rate in rates if group in rate], points) for group in groups
    }


def _batch(step: Fields, world: int) -> float:
    return float((whole(step.get("micro_batch")) or 1) * (whole(step.get("accumulation")) or 1) * world)


def _memory(events: Sequence[Fields]) -> dict[str, Curve]:
    found: dict[str, Curve] = {}
    for one in events:
        for tier, owners in list(mapping(one.get("used_bytes")).items())[:_MOST_GROUPS]:
            curve = found.setdefault(tier, {"step": [], "value": []})
            curve["step"].append(_step(one))
            curve["value"].append(sum(numbers(owners).values()))
    return found


def _switch(event: Fields) -> dict[str, Any]:
    return {
        "step": _step(event),
        "before": text(event.get("before"), 40),
        "after": text(event.get("after"), 40),
        "reason": text(event.get("reason")),
    }


# -- comparison -------------------------------------------------------------------------------------------------------


def config_differences(configs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The keys of the configs whose values differ, with the value of each run."""
    flat = {run: dict(_flattened(config, "", 0)) for run, config in configs.items()}
    keys = sorted({key for values in flat.values() for key in values})
    found = []
    for key in keys:
        values = {run: values.get(key) for run, values in flat.items()}
        first, *others = [repr(value) for value in values.values()]
        if any(other != first for other in others):
            found.append({"key": key, "values": values})
    return found


def _flattened(value: Any, key: str, depth: int) -> list[tuple[str, Any]]:
    """The leaves of nested mappings and lists, with dotted names."""
    if isinstance(value, dict) and value and depth < 12:
        parts = [(f"{key}.{name}" if key else str(name), inner) for name, inner in value.items()]
    elif isinstance(value, list) and value and depth < 12 and isinstance(value[0], dict | list):
        parts = [(f"{key}[{index}]", inner) for index, inner in enumerate(value)]
    else:
        return [(key, value)]
    return [leaf for name, inner in parts for leaf in _flattened(inner, name, depth + 1)]
