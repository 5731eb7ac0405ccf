"""Place a demand on the memory tiers of a machine, under one set of choices. Pure; every byte is counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gracetune.hardware.allocation import CAREFUL_CAP
from gracetune.hardware.machine import Machine
from gracetune.memory.placement import Role as PlacementRole
from gracetune.memory.placement import choose_placement
from gracetune.planning.activations import RecomputePolicy
from gracetune.planning.demand import Demand, Need, Phase, Role, Workload
from gracetune.planning.memory_tiers import CONTEXT_BYTES, FRAGMENTATION, TierName, Tiers
from gracetune.units import format_bytes


@dataclass(frozen=True)
class PlanChoice:
    """One set of decisions."""

    policy: RecomputePolicy
    precision: str
    batch_cap: int
    """Largest micro-batch of any dataset."""
    encode_batch: int
    """Samples in a pass of the VAE's encoder."""
    tiling: bool
    """Whether the VAE works in tiles."""
    text_cache_on_device: bool = True
    park_experts: bool = False
    park_encoders: bool = False
    park_inputs: bool = False
    """Inputs of recomputed blocks wait in host memory. Has an effect with policy `full` only."""
    spill: int = 0
    """Bytes of each process's overflow arena; 0 means none."""


@dataclass(frozen=True)
class MemoryLine:
    """The bytes of one consumer in one tier during some phases, and why they are there."""

    name: str
    role: Role
    bytes: int
    tier: TierName
    phases: tuple[Phase, ...]
    why: str
    managed: bool = False
    """In managed memory, but not in the overflow arena (`overflow`)."""
    overflow: bool = False
    processes: int = 1
    """Processes of the machine that hold equal parts of these bytes."""


@dataclass(frozen=True)
class MemoryLayout:
    """A placed demand: the device memory of one process, and the main memory of one machine."""

    lines: tuple[MemoryLine, ...]
    phases: tuple[Phase, ...]

    def used(self, tier: TierName, phase: Phase) -> int:
        return sum(line.bytes for line in self.lines if line.tier == tier and phase in line.phases)

    def peak(self, tier: TierName) -> int:
        return max(self.used(tier, phase) for phase in self.phases)

    def spilled(self, phase: Phase) -> int:
        """Bytes that one process has in its overflow arena."""
        return self._per_process(phase, [line for line in self.lines if line.overflow])

    @property
    def managed(self) -> int:
        """Managed memory of one process besides the arena: caches and parked experts."""
        managed = [line for line in self.lines if line.managed]
        return max(self._per_process(phase, managed) for phase in self.phases)

    def _per_process(self, phase: Phase, lines: list[MemoryLine]) -> int:
        return sum(line.bytes // line.processes for line in lines if phase in line.phases)

    def excess(self, tiers: Tiers) -> dict[TierName, int]:
        """Bytes beyond the budget, by tier, largest first."""
        over = {
            tier.name: self.peak(tier.name) - tier.budget
            for tier in tiers.tiers
            if tier.budget is not None and self.peak(tier.name) > tier.budget
        }
        return dict(sorted(over.items(), key=lambda item: -item[1]))


def lay_out(demand: Demand, choice: PlanChoice, machine: Machine, tiers: Tiers) -> MemoryLayout:
    """Lay out the demand under `choice`."""
    needs = [*needs_under(demand, choice, machine)]
    local_ranks = demand.processes.per_machine
    by_phase = {phase: [*_lines_of(needs, phase, choice, machine, tiers, local_ranks)] for phase in demand.phases}
    for phase, lines in by_phase.items():
        lines.extend(_allowance(lines, phase, tiers))
        if choice.spill:
            by_phase[phase] = _spilled(lines, choice.spill, tiers)
        by_phase[phase] = [_machine_line(line, local_ranks) for line in by_phase[phase]]
    return MemoryLayout(_merged(by_phase), demand.phases)


_SHARED: tuple[Role, ...] = ("latent cache", "text cache", "staged data")
"""Roles with one copy in main memory for all processes of a machine."""


def _machine_line(line: MemoryLine, processes: int) -> MemoryLine:
    """A line for the whole machine: processes share its main memory, so private bytes count once per process."""
    if processes == 1 or line.tier not in ("host", "pool"):
        return line
    if line.role in _SHARED:
        return line
    why = f"{line.why}; {processes} processes, {format_bytes(line.bytes)} each"
    return replace(line, bytes=processes * line.bytes, why=why, processes=processes)


def needs_under(demand: Demand, choice: PlanChoice, machine: Machine) -> Iterator[Need]:
    """The needs under `choice`, not yet placed."""
    yield from demand.needs
    loaded = tuple(phase for phase in demand.phases if phase in ("train", "sample"))
    parks = choice.park_experts and any(one.parkable for one in demand.denoisers)
    # An expert parked in managed memory stays allocated there; only its pages migrate.
    take_turns = not any(one.only_sampled for one in demand.denoisers)
    managed = parks and take_turns and _parks_in_managed_memory(demand, choice, machine)
    for denoiser in demand.denoisers:
        role: Role = "trained weights" if denoiser.trained else "frozen weights"
        size, idle = denoiser.size(choice.precision), denoiser.idle_in_training
        why = _precision_words(choice.precision) + (demand.processes.part if denoiser.sharded else "")
        busy = () if idle else loaded
        parkable = denoiser.parkable
        yield Need(
            denoiser.name, role, size, busy, why, idle=loaded if idle else (), parkable=parkable, managed=managed
        )
        if parks and take_turns and not idle and not _parks_in_managed_memory(demand, choice, machine):
            # Frozen weights are never copied back to the host, so the active expert keeps its pinned host copy.
            why = "pinned home of the expert that is on the GPU: switching copies one way"
            yield Need(f"{denoiser.name}, home copy", role, size, loaded, why, home="host")
    yield from _activation_needs(demand, choice)
    yield from _codec_needs(demand, choice)


def _parks_in_managed_memory(demand: Demand, choice: PlanChoice, machine: Machine) -> bool:
    """Whether idle experts wait in managed memory.

    An overflow arena opens the unified-memory layer too. As in `train.assembly.open_host`, `enable_uvm_hints: false`
    rules managed memory out.
    """
    settings = demand.settings
    opens = settings.managed or choice.spill > 0
    return machine.profile.value == "superchip" and opens and not settings.rejects_managed


def _codec_needs(demand: Demand, choice: PlanChoice) -> Iterator[Need]:
    codec, tiles = demand.codec, " in tiles" if choice.tiling else ""
    encode = choice.encode_batch * (codec.encode_tiled if choice.tiling else codec.encode)
    why = f"batch {choice.encode_batch} of {codec.what}{tiles}"
    yield Need("VAE encoding", "workspace", encode, ("encode latents",), why)
    refresh = choice.encode_batch * (codec.refresh_tiled if choice.tiling else codec.refresh)
    if refresh:
        why = f"batch {choice.encode_batch}{tiles}, beside the step: refresh_each_epoch"
        yield Need("encoding the next epoch", "workspace", refresh, ("train",), why)
    decode = codec.decode_tiled if choice.tiling else codec.decode
    if decode:
        yield Need("VAE decoding", "workspace", decode, ("sample",), f"one sample{tiles}")


def _precision_words(precision: str) -> str:
    return {
        "fp8": "fp8 in both layouts: the backward pass reads the transposed one",
        "fp8 one layout": "fp8 in one layout, transposed on the fly in the backward pass",
        "int8": "frozen, int8 with a scale for each row, and the largest matrix once more while it multiplies",
        "trained": "fp32 master weights",
        "trained bf16": "trained, bf16; their fp32 masters are part of the optimizer's state",
    }.get(precision, f"frozen, {precision}")


def largest_workload(demand: Demand, choice: PlanChoice) -> Workload:
    def total(load: Workload) -> int:
        return load.under(choice.policy).total(min(load.batch, choice.batch_cap), parked=choice.park_inputs)

    return max(demand.workloads, key=total)


def _activation_needs(demand: Demand, choice: PlanChoice) -> Iterator[Need]:
    load = largest_workload(demand, choice)
    batch, entry = min(load.batch, choice.batch_cap), load.under(choice.policy)
    whole = {"off": "all kept", "full": "blocks' inputs kept"}
    kept = whole.get(choice.policy, f"a {choice.policy} kept, the rest repeated")
    why = f"batch {batch}, {kept}; {load.label}"
    parked = batch * entry.parkable if choice.park_inputs else 0
    yield Need("activations", "activations", batch * entry.kept - parked, ("train",), why)
    if parked:
        why = "blocks' inputs between the two passes; pinned, brought back a block ahead"
        yield Need("parked block inputs", "activations", parked, ("train",), why, home="host")
    yield Need(
        "backward pass",
        "workspace",
        batch * entry.working,
        ("train",),
        "gradients in flight, block being repeated",
    )
    if entry.rebuilt:
        why = "LyCORIS rebuilds whole weights"
        yield Need("rebuilt weights", "activations", entry.rebuilt, ("train",), why)


def _lines_of(
    needs: list[Need], phase: Phase, choice: PlanChoice, machine: Machine, tiers: Tiers, local_ranks: int
) -> Iterator[MemoryLine]:
    for need in needs:
        if phase in need.busy:
            tier, why, managed = _busy_tier(need, choice, machine, tiers, local_ranks)
        elif phase in need.idle:
            (tier, why), managed = _idle_tier(need, choice, machine, tiers), need.managed
        else:
            continue
        yield MemoryLine(need.name, need.role, need.bytes, tier, (phase,), why, managed)


def _busy_tier(
    need: Need, choice: PlanChoice, machine: Machine, tiers: Tiers, local_ranks: int
) -> tuple[TierName, str, bool]:  # fmt: skip
    """The tier, the reason, and whether that is managed memory."""
    if need.home == "disk":
        return "disk", need.why, False
    if need.home == "device":
        return tiers.compute, need.why, need.managed
    if need.role not in ("latent cache", "text cache"):
        return tiers.store, need.why, False
    role: PlacementRole = "latent_cache" if need.role == "latent cache" else "text_cache"
    device = machine.gpus[0].memory_total if machine.gpus else None
    known = device if choice.text_cache_on_device else None
    profile = machine.profile.value
    if need.managed_requested and profile == "discrete" and need.bytes <= CAREFUL_CAP:
        profile = "superchip"  # as in `cache.residence.choose_residence`, which rejects more than the cap
    placement = choose_placement(role, profile, size=need.bytes, device_bytes=known, local_ranks=local_ranks)
    managed = placement.kind in ("managed_host", "managed_device")
    if managed and not need.managed:
        return tiers.store, f"{need.why}; page-locked main memory", False
    tier = tiers.compute if placement.kind == "managed_device" else tiers.store
    return tier, f"{need.why}; {placement.reason}", managed


def _idle_tier(need: Need, choice: PlanChoice, machine: Machine, tiers: Tiers) -> tuple[TierName, str]:
    expert = need.role != "encoder weights"
    parked = choice.park_experts if expert else choice.park_encoders
    if not (need.parkable and parked):
        return tiers.compute, f"{need.why}; idle, there is room"
    if tiers.parking == "disk":
        return "disk", "released after use, read again if needed"
    if not expert:
        return tiers.parking, "parked in main memory while it is idle"
    profile = machine.profile.value if need.managed else "discrete"
    return tiers.parking, f"parked: {choose_placement('cold_weights', profile).reason}"


def _allowance(lines: list[MemoryLine], phase: Phase, tiers: Tiers) -> Iterator[MemoryLine]:
    if not tiers.has_gpu:
        return
    stored = ("latent cache", "text cache", "staged data", "process")
    used = sum(line.bytes for line in lines if line.tier == tiers.compute and line.role not in stored)
    why = f"CUDA context {format_bytes(CONTEXT_BYTES)}, fragmentation {FRAGMENTATION:.0%}"
    yield MemoryLine("allowance", "allowance", CONTEXT_BYTES + int(used * FRAGMENTATION), tiers.compute, (phase,), why)


# The arena takes what no longer fits. Weights are loaded first, so what is allocated later spills first. Optimizer
# state is left out on purpose: optimizers cannot run from host memory, so no plan may rely on it.
_SPILLS_FIRST: tuple[Role, ...] = (
    "activations", "workspace", "gradients", "compute copy", "EMA", "trained weights",
    "frozen weights", "encoder weights",
)  # fmt: skip


def _spilled(lines: list[MemoryLine], arena: int, tiers: Tiers) -> list[MemoryLine]:
    """Move what exceeds the device's budget into the overflow arena, up to the size of the arena."""
    budget = tiers[tiers.compute].budget
    over = sum(line.bytes for line in lines if line.tier == tiers.compute) - (budget or 0)
    left = min(max(0, over), arena)
    result: list[MemoryLine] = []
    candidates = sorted(lines, key=lambda line: _SPILLS_FIRST.index(line.role) if line.role in _SPILLS_FIRST else 99)
    for line in candidates:
        moved = min(left, line.bytes) if line.tier == tiers.compute and line.role in _SPILLS_FIRST else 0
        left -= moved
        if moved:
            why = f"overflow of {line.name}: in managed memory, reached over the link"
            result.append(replace(line, bytes=moved, tier=tiers.store, why=why, managed=False, overflow=True))
        if moved < line.bytes or not moved:
            result.append(replace(line, bytes=line.bytes - moved))
    return result


def _merged(by_phase: dict[Phase, list[MemoryLine]]) -> tuple[MemoryLine, ...]:
    """Merge lines that are equal in several phases."""
    merged: dict[tuple[str, int, TierName, str, int], MemoryLine] = {}
    for lines in by_phase.values():
        seen: Counter[tuple[str, int, TierName, str]] = Counter()
        for line in lines:
            kind = (line.name, line.bytes, line.tier, line.why)
            # Equal lines within one phase are different consumers and stay separate.
            key = (*kind, seen[kind])
            seen[kind] += 1
            before = merged.get(key)
            merged[key] = line if before is None else replace(before, phases=before.phases + line.phases)
    return tuple(merged.values())
