"""Properties of every plan, for any demand and machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gracetune.config import Environment, load
from gracetune.hardware.machine import Machine
from gracetune.hardware.recording import load_recording
from gracetune.planning.activations import Activations, RecomputePolicy
from gracetune.planning.config_demand import demand_of
from gracetune.planning.demand import PHASES, CodecPasses, Demand, Denoiser, Need, PlanSettings, Workload
from gracetune.planning.layout import PlanChoice, lay_out, needs_under
from gracetune.planning.memory_tiers import FRAGMENTATION, HEADROOM, tiers_of
from gracetune.planning.plan import INPUTS, Plan, plan
from gracetune.planning.processes import Processes
from gracetune.units import GIB, MIB

MACHINES = Path(__file__).parents[2] / "fixtures" / "machines"
KNOWN = {name: load_recording(MACHINES / name) for name in ("gh200-numa", "gh200-cdmm", "x86-h200", "gb10", "cpu-only")}
SIZE = st.integers(0, 80 * GIB)
RANK = {"does not fit": 0, "fits with these changes": 1, "fits": 2}
EXAMPLE = Path(__file__).parents[3] / "examples" / "wan22_t2v_automagic.yaml"
IDLE = {"placement: encoders", "placement: idle expert"}
ORDER: tuple[RecomputePolicy, ...] = ("off", "half", "quarter", "tenth", "full")


@st.composite
def needs(draw: st.DrawFn) -> Need:
    role = draw(st.sampled_from(["encoder weights", "optimizer state", "latent cache", "text cache", "staged data",
                                 "gradients", "checkpoints", "workspace"]))  # fmt: skip
    busy = draw(st.sets(st.sampled_from(PHASES), min_size=1))
    idle = draw(st.sets(st.sampled_from([phase for phase in PHASES if phase not in busy]))) if len(busy) < 4 else set()
    home = {"latent cache": "host", "text cache": "host", "staged data": "host", "checkpoints": "disk"}
    return Need(
        name=draw(st.text("abcdef", min_size=1, max_size=4)),
        role=role,
        bytes=draw(SIZE),
        busy=tuple(sorted(busy)),
        why="",
        home=home.get(role, "device"),  # type: ignore[arg-type]
        idle=tuple(sorted(idle)) if role == "encoder weights" else (),
        parkable=role == "encoder weights",
    )


@st.composite
def workloads(draw: st.DrawFn, policies: tuple[RecomputePolicy, ...]) -> Workload:
    kept = sorted((draw(st.integers(0, 30 * GIB)) for _ in policies), reverse=True)
    working, rebuilt = draw(st.integers(0, 4 * GIB)), draw(st.integers(0, 20 * GIB))
    parkable = draw(st.integers(0, kept[-1]))
    entries = tuple(
        Activations(policy, size, working, rebuilt, parkable if policy == "full" else 0)
        for policy, size in zip(policies, kept, strict=True)
    )
    return Workload("training.batch_size", "data", draw(st.integers(1, 80)), entries)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    policies = draw(st.sampled_from([ORDER, ("off", "full")]))
    precision = draw(st.sampled_from(["bf16", "fp8"]))
    whole = draw(st.integers(2, 60 * GIB))
    sizes = (("bf16", whole), ("fp8", whole), ("fp8 one layout", whole // 2), ("int8", whole // 2))
    experts = draw(st.integers(1, 2))
    encode = draw(st.integers(0, 20 * GIB))
    refresh = draw(st.sampled_from([0, encode]))
    passes = draw(st.integers(1, 8)), "cache.vae_batch_size", encode, encode // 4, 0, 0, False, ""
    return Demand(
        title="anything",
        needs=tuple(draw(st.lists(needs(), max_size=6))),
        denoisers=tuple(Denoiser(f"expert {index}", sizes, idle_in_training=index > 0) for index in range(experts)),
        workloads=tuple(draw(st.lists(workloads(policies), min_size=1, max_size=3))),
        codec=CodecPasses(*passes, refresh, refresh // 4),
        settings=PlanSettings(
            checkpointing=draw(st.sampled_from(["off", "auto", "full"])),
            policies=policies,
            precision=precision,
            can_store_8_bits=draw(st.booleans()),
            may_use_int8=precision == "bf16" and draw(st.booleans()),
            use_uvm=draw(st.booleans()),
            oversubscription_ratio=draw(st.floats(1.1, 8.0)),
            managed=draw(st.booleans()),
        ),
        phases=draw(st.sampled_from([PHASES, PHASES[:3]])),
        processes=draw(st.sampled_from([Processes(), Processes(), Processes(2, 2), Processes(8, 4)])),
    )


def resized(whole: Machine, device: int, host: int) -> Machine:
    """The machine with other amounts of memory; installed memory grows with free memory."""
    gpus = tuple(gpu.model_copy(update={"memory_total": device, "memory_free": None}) for gpu in whole.gpus)
    memory = whole.host.model_copy(update={"cpu_mem_available": host, "cpu_mem_total": 40 * GIB, "cgroup": None})
    return whole.model_copy(update={"gpus": gpus, "host": memory})


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    name = draw(st.sampled_from(sorted(KNOWN)))
    return resized(KNOWN[name], draw(st.integers(GIB, 200 * GIB)), draw(st.integers(GIB, 600 * GIB)))


class TestEveryPlan:
    @given(demands(), machines())
    @settings(deadline=None)
    def test_one_that_fits_stays_within_every_budget_in_every_phase(self, demand: Demand, machine: Machine) -> None:
        found = plan(demand, machine)
        budgets = {use.tier.name: use.tier.budget for use in found.tiers}
        within = all(
            used <= (budgets[tier] if budgets[tier] is not None else used)
            for use in found.phases
            for tier, used in use.used.items()
        )
        assert within == found.verdict.startswith("fits")

    @given(demands(), machines())
    @settings(deadline=None)
    def test_totals_add_up(self, demand: Demand, machine: Machine) -> None:
        found = plan(demand, machine)
        for use in found.phases:
            for tier, used in use.used.items():
                assert used == sum(x.bytes for x in found.lines if x.tier == tier and use.phase in x.phases)
        for total in found.tiers:
            assert total.peak == max(use.used[total.tier.name] for use in found.phases)

    @given(demands(), machines(), st.data())
    @settings(deadline=None)
    def test_every_byte_is_placed_exactly_once(self, demand: Demand, machine: Machine, data: st.DataObject) -> None:
        choice = PlanChoice(
            policy=data.draw(st.sampled_from(demand.settings.policies)),
            precision=data.draw(st.sampled_from(["bf16", "fp8", "fp8 one layout"])),
            batch_cap=data.draw(st.integers(1, 80)),
            encode_batch=data.draw(st.integers(1, demand.codec.batch)),
            tiling=data.draw(st.booleans()),
            text_cache_on_device=data.draw(st.booleans()),
            park_experts=data.draw(st.booleans()),
            park_encoders=data.draw(st.booleans()),
            park_inputs=data.draw(st.booleans()),
            spill=data.draw(st.sampled_from([0, GIB, 500 * GIB])),
        )
        tiers = tiers_of(machine)
        layout = lay_out(demand, choice, machine, tiers)
        for phase in demand.phases:
            alive = sum(n.bytes for n in needs_under(demand, choice, machine) if phase in (*n.busy, *n.idle))
            held = [x for x in layout.lines if phase in x.phases and x.role != "allowance"]
            assert sum(x.bytes // x.processes for x in held) == alive
            assert all(x.bytes % x.processes == 0 for x in held)

    @given(demands(), machines())
    @settings(deadline=None)
    def test_a_fitting_one_without_edits_has_automatic_changes_only(self, demand: Demand, machine: Machine) -> None:
        found = plan(demand, machine)
        edits = [entry for entry in found.changes if not entry.automatic]
        if found.verdict == "fits":
            assert edits == []
        if found.verdict == "fits with these changes":
            assert edits
        assert all(entry.saves >= 0 for entry in found.changes)


def rank(found: Plan) -> int:
    return RANK[found.verdict]


class TestMonotony:
    @given(demands(), machines(), st.integers(0, 100 * GIB), st.integers(0, 300 * GIB))
    @settings(deadline=None)
    def test_more_memory_never_makes_it_worse(self, demand: Demand, machine: Machine, gpu: int, host: int) -> None:
        device = machine.gpus[0].memory_total if machine.gpus else 0
        larger = resized(machine, (device or 0) + gpu, (machine.host.cpu_mem_available or 0) + host)
        assert rank(plan(demand, larger)) >= rank(plan(demand, machine))

    @given(demands(), machines(), st.integers(1, 40))
    @settings(deadline=None)
    def test_a_larger_batch_never_fits_better(self, demand: Demand, machine: Machine, more: int) -> None:
        def with_batch(extra: int) -> Demand:
            loads = tuple(
                Workload(load.key, load.label, load.batch + extra, load.activations) for load in demand.workloads
            )
            return Demand(**{**vars(demand), "workloads": loads})

        assert rank(plan(with_batch(more), machine)) <= rank(plan(with_batch(0), machine))

    @given(demands(), machines(), needs())
    @settings(deadline=None)
    def test_a_further_need_never_helps(self, demand: Demand, machine: Machine, extra: Any) -> None:
        further = Demand(**{**vars(demand), "needs": (*demand.needs, extra)})
        assert rank(plan(further, machine)) <= rank(plan(demand, machine))


def with_batch(demand: Demand, batch: int) -> Demand:
    loads = tuple(replace(load, batch=batch) for load in demand.workloads)
    ring = [replace(need, bytes=batch * need.bytes) if need.role == "batch ring" else need for need in demand.needs]
    return replace(demand, workloads=loads, needs=tuple(ring))


def parked(found: Plan) -> set[str]:
    return {entry.key for entry in found.changes if entry.key.startswith("placement: ")}


def placed(found: Plan, *, phase: str = "train") -> int:
    """Everything in memory in that phase, in any tier, without the allowance."""
    held = [line for line in found.lines if line.tier in ("device", "host") and line.role != "allowance"]
    return sum(line.bytes for line in held if phase in line.phases)


class TestBatches:
    """Each further sample costs the same, up to the last that fits and beyond."""

    @pytest.mark.parametrize(
        ("name", "checkpointing"),
        [("gh200-numa", "off"), ("gh200-numa", "auto"), ("gh200-cdmm", "full"), ("x86-h200", "full")],
    )
    def test_from_1_to_128(self, name: str, checkpointing: str) -> None:
        machine = KNOWN[name]
        overrides = [f'training.gradient_checkpointing="{checkpointing}"', "memory.use_uvm=true"]
        config = load(EXAMPLE, environment=Environment({}), overrides=overrides).config
        one, _ = demand_of(config, machine, 260)
        assert one.workloads[0].batch == 1
        per_batch = [plan(with_batch(one, batch), machine) for batch in range(1, 129)]
        fitting = [found for found in per_batch if found.verdict == "fits"]
        assert per_batch[: len(fitting)] == fitting, "one that fits after one that does not"
        entries = {entry.policy: entry for entry in one.workloads[0].activations}
        ring = next(need.bytes for need in one.needs if need.role == "batch ring")
        policies = [policy(found, checkpointing) for found in fitting]
        for smaller, larger, first, then in zip(fitting, fitting[1:], policies, policies[1:], strict=False):
            sample = entries[then].kept + entries[then].working + ring
            assert ORDER.index(first) <= ORDER.index(then)
            assert 0 <= larger.spilled_bytes - smaller.spilled_bytes <= sample * (1 + FRAGMENTATION) + MIB
            if first == then:
                assert parked(smaller) <= parked(larger), "something came back"
                home = sum(line.bytes for line in larger.lines if "home copy" in line.name)
                assert 0 < placed(larger) - placed(smaller) <= sample + MIB + home
            if larger.spilled_bytes:
                assert parked(larger) >= IDLE | ({INPUTS} if then == "full" else set())
                assert then == (ORDER[-1] if checkpointing == "auto" else checkpointing)
        spilling = [found for found in fitting if found.spilled_bytes]
        assert bool(spilling) == (name != "x86-h200")
        # Nothing overflows over PCIe: the batch has to be smaller.
        assert len(fitting) == 128 or per_batch[len(fitting)].verdict == "fits with these changes"

    def test_one_sample_too_many_keeps_everything_parked(self) -> None:
        """A reported bug: batch 39 parked everything idle; batch 40 brought back 37 GiB of it and spilled 96 GiB."""
        config = load(EXAMPLE, environment=Environment({}), overrides=["memory.use_uvm=true"]).config
        one, _ = demand_of(config, KNOWN["gh200-numa"], 260)
        last, first = (plan(with_batch(one, batch), KNOWN["gh200-numa"]) for batch in (39, 40))
        assert parked(last) == parked(first) == {*IDLE, INPUTS}
        assert (last.spilled_bytes, first.spilled_bytes < GIB) == (0, True)
        assert first.spilled_bytes > 0
        assert last.managed_bytes == first.managed_bytes == 2 * one.denoisers[0].size("bf16")


def policy(found: Plan, checkpointing: str) -> RecomputePolicy:
    if checkpointing == "full":
        return "full"
    steps = [entry.after for entry in found.changes if entry.key == "training.gradient_checkpointing"]
    return next((name for name in ORDER if steps and steps[0] == f"auto: {name}"), "off")


class TestHeadroom:
    @given(machines())
    @settings(deadline=None)
    def test_plans_leave_five_percent_of_the_gpu_free(self, machine: Machine) -> None:
        assume(machine.profile.value in ("superchip", "discrete"))
        tier = tiers_of(machine)["device"]
        assert tier.capacity is not None
        assert tier.budget == int(tier.capacity * (1 - HEADROOM))
