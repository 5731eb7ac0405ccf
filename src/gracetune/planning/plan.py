"""Plan a run on a machine: whether it fits, where everything is placed, what would have to change. Pure functions.

The plan is the first choice of the ladder (`ladder.py`) that fits. Every deviation from the config is listed with the
memory it saves, except a small text cache that is counted in main memory instead of on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from gracetune.hardware.machine import Machine
from gracetune.planning.activations import BUDGETS, RecomputePolicy
from gracetune.planning.demand import Demand, Phase
from gracetune.planning.ladder import Ladder
from gracetune.planning.layout import MemoryLayout, MemoryLine, PlanChoice, largest_workload
from gracetune.planning.memory_tiers import HEADROOM, Tier, TierName, Tiers, tiers_of
from gracetune.units import format_bytes

Verdict = Literal["fits", "fits with these changes", "does not fit", "unknown"]
CheckpointingValue = Literal["off", "auto", "full"]
CONFIG_VALUE: dict[RecomputePolicy, CheckpointingValue] = {
    "off": "off", "half": "auto", "quarter": "auto", "tenth": "auto", "full": "full"
}  # fmt: skip
COSTS: dict[RecomputePolicy, str] = {"half": "about 7 % slower", "full": "forward passes run twice: 1.4x slower"}
BASE = "model.base_precision"
INPUTS = "placement: block inputs"
"""Key of the change that parks inputs of recomputed blocks."""


@dataclass(frozen=True)
class Change:
    """One deviation from the config or from the fastest placement; `automatic` ones need no edit."""

    key: str
    before: str
    after: str
    saves: int
    """Bytes saved at the peak of the compute tier."""
    why: str
    automatic: bool


@dataclass(frozen=True)
class Checkpointing:
    """The recomputation that the plan chose, as the config's value and as torch.compile's budget."""

    value: CheckpointingValue
    activation_memory_budget: float | None
    """The budget for torch.compile: the share of activations it may keep; None if it does not apply."""
    why: str


@dataclass(frozen=True)
class TierUse:
    tier: Tier
    peak: int
    """Bytes."""


@dataclass(frozen=True)
class PhaseUse:
    phase: Phase
    used: dict[TierName, int]
    """Bytes by tier."""


@dataclass(frozen=True)
class Plan:
    verdict: Verdict
    summary: str
    """The decisive number, as a sentence."""
    changes: tuple[Change, ...]
    checkpointing: Checkpointing
    tiers: tuple[TierUse, ...]
    lines: tuple[MemoryLine, ...]
    phases: tuple[PhaseUse, ...]
    missing: tuple[str, ...] = ()
    """Fields that the machine report lacks, without which no verdict is possible."""
    notes: tuple[str, ...] = ()
    managed_bytes: int = 0
    """Managed memory of one process besides its overflow arena."""
    spilled_bytes: int = 0
    """Peak of one process's overflow arena."""


def plan(
    demand: Demand, machine: Machine, *, disk_free: int | None = None, force_oversubscription: bool = False
) -> Plan:
    """Find the first choice that fits.

    `force_oversubscription` allows an overflow arena on machines without a coherent link.
    """
    tiers = tiers_of(machine, disk_free, gpus=demand.processes.per_machine)
    ladder = Ladder(demand, machine, tiers, force_oversubscription)
    start = ladder.start
    if tiers.missing:
        facts = " and ".join(tiers.missing)
        words = f"the machine report lacks {facts}; make one there with: gracetune doctor --output machine.json"
        return _build(ladder, "unknown", words, start)

    found = next(filter(ladder.fits, ladder.without_edits()), None)
    verdict: Verdict = "fits"
    if found is None:
        found = next(filter(ladder.fits, ladder.with_edits()), None)
        verdict = "fits with these changes"
    if found is None:
        *_, smallest = ladder.with_edits()
        return _build(ladder, "does not fit", _shortage(ladder.lay_out(smallest), tiers), smallest)
    chosen = ladder.pruned(found)
    return _build(ladder, verdict, _fits(ladder.lay_out(chosen), tiers), chosen)


def _fits(layout: MemoryLayout, tiers: Tiers) -> str:
    tier = tiers[tiers.compute]
    peak = layout.peak(tiers.compute)
    return f"peak {format_bytes(peak)} of {format_bytes(tier.budget or 0)} usable in {tier.label}"


def _shortage(layout: MemoryLayout, tiers: Tiers) -> str:
    words = []
    for name, over in layout.excess(tiers).items():
        tier, peak = tiers[name], layout.peak(name)
        capacity_needed = (
            int(peak / (1 - HEADROOM)) if name == "device" else peak + (tier.capacity or 0) - (tier.budget or 0)
        )
        words.append(f"{format_bytes(over)} too much for {tier.label}; it would take {format_bytes(capacity_needed)}")
    return "; ".join(words)


def _build(ladder: Ladder, verdict: Verdict, summary: str, chosen: PlanChoice) -> Plan:
    demand, machine, tiers = ladder.demand, ladder.machine, ladder.tiers
    layout = ladder.lay_out(chosen)
    return Plan(
        verdict=verdict,
        summary=summary,
        # If the run does not fit, show only changes that save something.
        changes=tuple(change for change in _changes(ladder, chosen) if change.saves or verdict != "does not fit"),
        checkpointing=_checkpointing(demand, machine, tiers, chosen),
        tiers=tuple(TierUse(tier, layout.peak(tier.name)) for tier in tiers.tiers),
        lines=layout.lines,
        phases=tuple(
            PhaseUse(phase, {tier.name: layout.used(tier.name, phase) for tier in tiers.tiers})
            for phase in demand.phases
        ),
        missing=tiers.missing,
        notes=tuple(_notes(ladder, chosen, verdict)),
        managed_bytes=layout.managed,
        spilled_bytes=max(layout.spilled(phase) for phase in layout.phases),
    )


def _changes(ladder: Ladder, end: PlanChoice) -> Iterator[Change]:
    """Go from the first choice to the last one decision at a time; each is a change with what it saves."""
    demand, machine, tiers = ladder.demand, ladder.machine, ladder.tiers
    current = ladder.start
    for decision in (
        {"park_encoders": end.park_encoders},
        {"park_experts": end.park_experts},
        {"text_cache_on_device": end.text_cache_on_device},
        {"encode_batch": end.encode_batch},
        {"tiling": end.tiling},
        {"policy": end.policy},
        {"park_inputs": end.park_inputs},
        {"batch_cap": end.batch_cap},
        {"precision": end.precision},
        {"spill": end.spill},
    ):
        after = replace(current, **decision)
        if after == current:
            continue
        saved = ladder.lay_out(current).peak(tiers.compute) - ladder.lay_out(after).peak(tiers.compute)
        for change in _described(demand, machine, tiers, current, after, saved):
            if saved or not change.automatic:
                yield change
        current = after


def _described(
    demand: Demand, machine: Machine, tiers: Tiers, before: PlanChoice, after: PlanChoice, saved: int
) -> Iterator[Change]:  # fmt: skip
    settings, compute_label = demand.settings, tiers[tiers.compute].label
    if before.park_experts != after.park_experts and any(item.idle_in_training for item in demand.denoisers):
        why = "brought back when its turn comes"
        yield Change("placement: idle expert", compute_label, tiers[tiers.parking].label, saved, why, automatic=True)
    if before.park_encoders != after.park_encoders:
        placement = "released" if tiers.parking == "disk" else tiers[tiers.parking].label
        yield Change(
            "placement: encoders", compute_label, placement, saved, "needed only in the encode passes", automatic=True
        )
    if before.encode_batch != after.encode_batch:
        first, then = str(before.encode_batch), str(after.encode_batch)
        yield Change(demand.codec.batch_key, first, then, saved, "the encode pass has its own peak", automatic=False)
    if before.tiling != after.tiling:
        yield Change("model.vae_tiling", "false", "true", saved, "the VAE works on pieces", automatic=False)
    if before.policy != after.policy:
        automatic = settings.checkpointing == "auto"
        first, then = ("auto: off", f"auto: {after.policy}") if automatic else ("off", CONFIG_VALUE[after.policy])
        cost = COSTS.get(after.policy, "more of each forward pass runs twice: between 7 % and 1.4x slower")
        yield Change("training.gradient_checkpointing", first, then, saved, cost, automatic)
    if before.park_inputs != after.park_inputs:
        placement = tiers[tiers.parking].label
        yield Change(INPUTS, compute_label, placement, saved, _parking_words(demand, machine, after), automatic=True)
    if before.batch_cap != after.batch_cap:
        yield from _batch_changes(demand, after, saved)
    if before.precision != after.precision:
        if settings.precision == "fp8":
            why = "the second layout is made on the fly"
            yield Change("placement: fp8 layouts", "both", "one", saved, why, automatic=True)
        elif settings.may_use_int8:
            why = f"{settings.precision} does not fit"
            yield Change(BASE, f"auto: {settings.precision}", "auto: int8", saved, why, automatic=True)
        else:
            held = "int8" if after.precision == "int8" else "fp8"
            form = "int8" if held == "int8" else "one fp8 layout"
            why = f"frozen weights in {form}; compare a short run's loss before trusting it"
            yield Change(BASE, settings.precision, held, saved, why, automatic=False)
    if before.spill != after.spill:
        link = "the coherent link" if machine.profile.value == "superchip" else "PCIe"
        why = f"what exceeds GPU memory is used over {link}, several times slower for those bytes"
        first, then = (compute_label, "overflow arena") if settings.use_uvm else ("false", "true")
        yield Change("memory.use_uvm", first, then, saved, why, automatic=settings.use_uvm)


def _parking_words(demand: Demand, machine: Machine, choice: PlanChoice) -> str:
    """The traffic on the link. The time of a block is unknown before the run, so no slowdown is predicted."""
    load = largest_workload(demand, choice)
    size = min(load.batch, choice.batch_cap) * load.under(choice.policy).parkable
    rate = link_rate(machine)
    duration = "the link's speed is not known" if rate is None else f"{size / rate:.2f} s at the link's declared speed"
    return f"{format_bytes(size)} each way in every step, beside the blocks' work ({duration}); the run reports waits"


def link_rate(machine: Machine) -> float | None:
    """Declared bytes per second of the first GPU's PCIe link; None for any other link."""
    gpu = machine.gpus[0] if machine.gpus else None
    if gpu is None or gpu.pcie is None or machine.profile.value != "discrete":
        return None
    speed, width = gpu.pcie.max_speed_gts, gpu.pcie.max_width
    # PCIe 3 and later encode 128 bits of data in 130 bits.
    return None if speed is None or width is None else speed * 1e9 * width / 8 * 128 / 130


def _batch_changes(demand: Demand, after: PlanChoice, saved: int) -> Iterator[Change]:
    keys = {load.key: load.batch for load in demand.workloads if load.batch > after.batch_cap}
    why = "accumulate more to keep the effective batch"
    for key, batch in keys.items():
        yield Change(key, str(batch), str(after.batch_cap), saved, why, automatic=False)
        saved = 0  # several keys can set the batch size; the saving counts once


def _checkpointing(demand: Demand, machine: Machine, tiers: Tiers, chosen: PlanChoice) -> Checkpointing:
    load = largest_workload(demand, chosen)
    batch = min(load.batch, chosen.batch_cap)
    sizes = ", ".join(f"{entry.policy} {format_bytes(entry.total(batch))}" for entry in load.activations)
    value = CONFIG_VALUE[chosen.policy]
    part = BUDGETS.get(chosen.policy) if "half" in demand.settings.policies else None
    budget = None if part is None else float(part)
    if demand.settings.checkpointing != "auto" and demand.settings.checkpointing == value:
        why = f"as the config says ({sizes})"
    elif chosen.policy == "off":
        why = f"everything fits without repeating work ({sizes})"
    else:
        why = f"the fastest that fits ({sizes})"
    return Checkpointing(value, budget, why)


def _notes(ladder: Ladder, chosen: PlanChoice, verdict: Verdict) -> Iterator[str]:
    demand, machine = ladder.demand, ladder.machine
    processes, gpus = demand.processes, len(machine.gpus)
    if gpus > processes.per_machine:
        # `train` shows this note too, but has no --processes option.
        all_of_them = f"gracetune estimate CONFIG --processes {gpus}"
        yield f"{gpus} GPUs: the plan is for {processes.per_machine} of them; {all_of_them} plans for all"
    if processes.count > 1:
        yield (
            "batch sizes are those of one process; runs of several GPUs have never been measured, and buffers of the "
            "communication library (NCCL) are not counted"
        )
    if verdict == "unknown":
        return
    if demand.settings.checkpointing == "full" and verdict == "fits":
        layout = ladder.lay_out(replace(chosen, policy="off"))
        if not layout.excess(ladder.tiers):
            peak = format_bytes(layout.peak(ladder.tiers.compute))
            yield f"gradient_checkpointing full is not needed here: off takes {peak}, and fits"
    if demand.settings.use_uvm and machine.profile.value != "superchip":
        yield _without_link(ladder, chosen)


def _without_link(ladder: Ladder, chosen: PlanChoice) -> str:
    if not ladder.force_oversubscription:
        return "memory.use_uvm: without a coherent link nothing is counted on the overflow arena"
    if not chosen.spill:
        return "memory.use_uvm: --force-oversubscription lifts the arena's cap; this plan does not need it"
    return (
        f"--force-oversubscription: up to {format_bytes(chosen.spill)} beyond the GPU's memory over a link that is not "
        "coherent. This can hang the driver until the machine is rebooted"
    )
