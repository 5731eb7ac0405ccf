"""The output of a memory plan, as text (one screen, readable at 80 columns) and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gracetune.hardware import Machine
from gracetune.planning.demand import Demand
from gracetune.planning.layout import MemoryLine
from gracetune.planning.plan import Change, Plan, TierUse
from gracetune.units import GIB, MIB, format_bytes

_STYLES = {"fits": "green", "fits with these changes": "yellow", "does not fit": "bold red", "unknown": "yellow"}
_SMALL = 16 * MIB
"""Lines below this size are added up."""


def as_json(demand: Demand, plan: Plan, machine: Machine, assumptions: tuple[str, ...]) -> dict[str, Any]:
    return {
        "verdict": plan.verdict,
        "summary": plan.summary,
        "run": demand.title,
        "machine": {"profile": machine.profile.value, "gpu": machine.gpus[0].name if machine.gpus else None},
        "processes": asdict(demand.processes),
        "changes": [_change(change) for change in plan.changes],
        "checkpointing": asdict(plan.checkpointing),
        "tiers": [_tier(use) for use in plan.tiers],
        "lines": [_line(line) for line in plan.lines],
        "phases": [{"phase": use.phase, "used": use.used} for use in plan.phases],
        "training_peak_gib": {
            policy: round(demand.training_peak(policy) / GIB, 2) for policy in demand.settings.policies
        },
        "managed_bytes": plan.managed_bytes,
        "spilled_bytes": plan.spilled_bytes,
        "missing": list(plan.missing),
        "notes": list(plan.notes),
        "assumptions": list(assumptions),
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "key": change.key,
        "from": change.before,
        "to": change.after,
        "saves": change.saves,
        "reason": change.why,
        "automatic": change.automatic,
    }


def _tier(use: TierUse) -> dict[str, Any]:
    tier = use.tier
    return {
        "tier": tier.name,
        "label": tier.label,
        "capacity": tier.capacity,
        "budget": tier.budget,
        "peak": use.peak,
        "reason": tier.why,
    }


def _line(line: MemoryLine) -> dict[str, Any]:
    return {
        "name": line.name,
        "role": line.role,
        "bytes": line.bytes,
        "tier": line.tier,
        "phases": list(line.phases),
        "processes": line.processes,
        "managed": line.managed or line.overflow,
        "reason": line.why,
    }


def print_plan(demand: Demand, plan: Plan, machine: Machine, assumptions: tuple[str, ...], console: Console) -> None:
    gpu = machine.gpus[0].name if machine.gpus else None
    console.print(Text(demand.title, "bold"))
    console.print(f"on {gpu or 'a machine without a GPU'} ({machine.profile.value})")
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for use in plan.tiers:
        for row in _tier_rows(plan, use):
            table.add_row(*row)
    console.print(table, soft_wrap=False)
    if demand.processes.words:
        _print_list(
            "processes", [f"{demand.processes.words}; GPU memory is one GPU's, main memory one machine's"], console
        )
    _print_phases(plan, console)
    _print_list("checkpointing", [f"{plan.checkpointing.value}: {plan.checkpointing.why}"], console)
    _print_list("assumed", list(assumptions), console)
    _print_list("note", list(plan.notes), console)
    _print_list("done for you", [_change_words(change) for change in plan.changes if change.automatic], console)
    edits = [_change_words(change) for change in plan.changes if not change.automatic]
    _print_list("even with" if plan.verdict == "does not fit" else "change", edits, console)
    console.print(Text(f"{plan.verdict.upper()}: {plan.summary}", style=_STYLES[plan.verdict]), soft_wrap=False)


def _tier_rows(plan: Plan, use: TierUse) -> Iterator[tuple[Text, Text, str]]:
    """The rows of a tier: its peak, and what it holds during training. Small lines are added up."""
    lines = [line for line in plan.lines if line.tier == use.tier.name and "train" in line.phases]
    if not lines and not use.peak:
        return
    lines.sort(key=lambda line: -line.bytes)
    heading = Text(use.tier.label, style="bold"), Text(format_bytes(use.peak), style="bold")
    if use.tier.name == "disk":
        yield *heading, ", ".join(f"{line.name} {format_bytes(line.bytes)}" for line in lines)
        return
    yield *heading, _limits(use)
    for line in lines:
        if line.bytes >= _SMALL:
            yield Text(f"  {line.name}"), Text(format_bytes(line.bytes)), line.why
    rest = [line for line in lines if line.bytes < _SMALL]
    if rest:
        yield (
            Text("  small items"),
            Text(format_bytes(sum(line.bytes for line in rest))),
            ", ".join(line.name for line in rest),
        )


def _limits(use: TierUse) -> str:
    tier = use.tier
    if tier.budget is None:
        return f"at the peak ({tier.why})"
    of_total = f" of {format_bytes(tier.capacity)}" if tier.capacity not in (None, tier.budget) else ""
    return f"at the peak, {format_bytes(tier.budget)}{of_total} usable ({tier.why})"


def _print_phases(plan: Plan, console: Console) -> None:
    compute = plan.tiers[0].tier.name
    parts = [f"{use.phase} {format_bytes(use.used[compute])}" for use in plan.phases]
    _print_list("phases", [", ".join(parts) + f" ({plan.tiers[0].tier.label})"], console)


def _print_list(label: str, entries: list[str], console: Console) -> None:
    if not entries:
        return
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for index, entry in enumerate(entries):
        table.add_row("" if index else label, Text(entry))
    console.print(table, soft_wrap=False)


def _change_words(change: Change) -> str:
    saves = f", saves {format_bytes(change.saves)}" if change.saves else ""
    return f"{change.key}: {change.before} -> {change.after}{saves} ({change.why})"
