"""The choices a plan tries, in a fixed order from no cost to the highest cost. Pure functions.

The order does not depend on the amount of memory, so more memory cannot make a plan worse. Idle weights leave the
device first, then tensors that a step reads again (inputs of recomputed blocks), and only then does a step use the
overflow arena. This order is the same for every batch size, so a larger batch never needs less overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from gracetune.hardware.allocation import GRANULE
from gracetune.hardware.machine import Machine
from gracetune.memory.arena_size import ArenaRoom, arena_size
from gracetune.models.footprint import FP8_CAPABILITY
from gracetune.planning.activations import RecomputePolicy
from gracetune.planning.demand import Demand
from gracetune.planning.layout import MemoryLayout, PlanChoice, lay_out
from gracetune.planning.memory_tiers import Tiers


@dataclass(frozen=True)
class Ladder:
    """Generates choices for one demand on one machine, and lays out each of them once."""

    demand: Demand
    machine: Machine
    tiers: Tiers
    force_oversubscription: bool = False
    _layouts: dict[PlanChoice, MemoryLayout] = field(default_factory=dict)

    def lay_out(self, choice: PlanChoice) -> MemoryLayout:
        if choice not in self._layouts:
            self._layouts[choice] = lay_out(self.demand, choice, self.machine, self.tiers)
        return self._layouts[choice]

    def fits(self, choice: PlanChoice) -> bool:
        return not self.lay_out(choice).excess(self.tiers)

    @property
    def start(self) -> PlanChoice:
        """The config as it is, with everything on the device."""
        settings, codec = self.demand.settings, self.demand.codec
        policy: RecomputePolicy = "full" if settings.checkpointing == "full" else "off"
        largest = max(load.batch for load in self.demand.workloads)
        return PlanChoice(policy, settings.precision, batch_cap=largest, encode_batch=codec.batch, tiling=codec.tiled)

    def without_edits(self) -> Iterator[PlanChoice]:
        """Choices that need no edit of the config: placement, and whatever the config leaves to `auto`."""
        choice, settings = self.start, self.demand.settings
        yield choice
        choice = replace(choice, park_encoders=True)
        yield choice
        if self.tiers.parking == "host":
            # Experts alternate all the time and encoders rarely come back, so encoders are parked first.
            choice = replace(choice, park_experts=True)
            yield choice
            yield replace(choice, park_encoders=False)  # if main memory has no room for both
        choice = replace(choice, text_cache_on_device=False)
        yield choice
        if choice.precision == "fp8":
            choice = replace(choice, precision="fp8 one layout")
            yield choice
        if settings.checkpointing == "auto":
            for policy in settings.policies[1:]:
                choice = replace(choice, policy=policy)
                yield choice
        if settings.may_use_int8 and settings.can_store_8_bits:
            for policy in settings.policies if settings.checkpointing == "auto" else (choice.policy,):
                choice = replace(choice, policy=policy, precision="int8")
                yield choice
        if choice.policy == "full" and self.tiers.parking == "host":
            choice = replace(choice, park_inputs=True)
            yield choice
        if settings.use_uvm:
            yield from self._spilling(choice)

    def with_edits(self) -> Iterator[PlanChoice]:
        """Further choices that need edits: VAE passes, recomputation, smaller batches, 8-bit weights, overflow."""
        *_, choice = self.without_edits()
        choice, settings = replace(choice, spill=0), self.demand.settings
        for batch in smaller_batches(choice.encode_batch):
            choice = replace(choice, encode_batch=batch)
            yield choice
        choice = replace(choice, tiling=True)
        yield choice
        if settings.checkpointing == "off":
            for policy in settings.policies[1:]:
                choice = replace(choice, policy=policy)
                yield choice
            if self.tiers.parking == "host":
                choice = replace(choice, park_inputs=True)
                yield choice
        largest = choice.batch_cap
        for batch in smaller_batches(largest):
            choice = replace(choice, batch_cap=batch)
            yield choice
        if settings.can_store_8_bits and choice.precision not in ("fp8 one layout", "int8"):
            held = "fp8 one layout" if _has_fp8(self.machine) else "int8"
            for batch in (largest, *smaller_batches(largest)):
                choice = replace(choice, precision=held, batch_cap=batch)
                yield choice
        yield from self._spilling(choice)
        # The last choice is the smallest; it describes a plan that does not fit.
        yield choice

    def _spilling(self, choice: PlanChoice) -> Iterator[PlanChoice]:
        """`choice` with an overflow arena, if the machine and the config allow one."""
        profile, settings = self.machine.profile.value, self.demand.settings
        forced = self.force_oversubscription and settings.use_uvm and profile == "discrete"
        if profile != "superchip" and not forced:
            return
        size = arena_size(
            ArenaRoom.for_arena(self.machine, sharers=self.demand.processes.per_machine),
            settings.oversubscription_ratio,
            other_managed=self.lay_out(replace(choice, spill=GRANULE)).managed,  # the same for an arena of any size
            force=forced,
        ).bytes
        if size:
            yield replace(choice, spill=size)

    def pruned(self, found: PlanChoice) -> PlanChoice:
        """Undo the choices that a later choice made unnecessary."""
        start, limit = self.start, self.lay_out(found)

        def is_sufficient(choice: PlanChoice) -> bool:
            """Whether `choice` fits, and no phase overflows more than in `found`."""
            layout = self.lay_out(choice)
            return self.fits(choice) and all(layout.spilled(phase) <= limit.spilled(phase) for phase in layout.phases)

        for batch in (start.encode_batch, *smaller_batches(start.encode_batch)):
            if batch > found.encode_batch and is_sufficient(replace(found, encode_batch=batch)):
                found = replace(found, encode_batch=batch)
        undoing: list[Callable[[PlanChoice], PlanChoice]] = [
            lambda choice: replace(choice, tiling=start.tiling),
            lambda choice: replace(choice, park_inputs=False),
        ]
        # While block inputs are parked, nothing else is moved back to the device.
        if is_sufficient(replace(found, park_inputs=False)):
            undoing += [
                lambda choice: replace(choice, text_cache_on_device=True),
                lambda choice: replace(choice, park_experts=False),
                # Encoders come back only after the experts: they are used less often.
                lambda choice: replace(choice, park_encoders=choice.park_encoders and choice.park_experts),
            ]
        for undo in undoing:
            if is_sufficient(undo(found)):
                found = undo(found)
        return found


def smaller_batches(batch: int) -> list[int]:
    """All smaller batch sizes in descending order; above 64 only multiples of 16."""
    return [size for size in range(batch - 1, 0, -1) if size <= 64 or size % 16 == 0]


def _has_fp8(machine: Machine) -> bool:
    text = machine.gpus[0].compute_capability if machine.gpus else None
    if text is None:
        return False
    major, _, minor = text.partition(".")
    return (int(major), int(minor or 0)) >= FP8_CAPABILITY
