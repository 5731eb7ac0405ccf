"""Plans for several processes: the memory of each GPU, and main memory that is shared or counted per process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gracetune.adapters.trainable import Tensors
from gracetune.errors import ConfigError
from gracetune.hardware.machine import Machine
from gracetune.models.registry import FOOTPRINTS
from gracetune.planning.demand import Demand
from gracetune.planning.plan import Plan, plan
from gracetune.planning.processes import GATHERED_BLOCKS, Processes
from gracetune.units import GIB
from unit.planning.test_plan import change, demand, machine, small_gpu, tier_of

WAN = next(one for one in FOOTPRINTS["wan"] if len(one.denoisers) == 2)
FULL = {"training": {"gradient_checkpointing": "full"}}


def with_gpus(whole: Machine, count: int) -> Machine:
    gpus = tuple(whole.gpus[0].model_copy(update={"index": at}) for at in range(count))
    return whole.model_copy(update={"gpus": gpus})


def sized(found: Plan | Demand, name: str) -> int:
    entries: Any = found.lines if isinstance(found, Plan) else found.needs
    return next(entry.bytes for entry in entries if entry.name == name)


def several(count: int, name: str = "x86-h200", *, sharded: bool = False, **sections: Any) -> tuple[Plan, Demand]:
    whole = with_gpus(machine(name), count)
    wanted = demand(processes=Processes.on(whole, count, sharded=sharded), **sections)
    return plan(wanted, whole), wanted


class TestReplicas:
    def test_a_gpu_holds_what_it_holds_alone(self) -> None:
        (alone, _), (two, _), (four, _) = (several(count) for count in (1, 2, 4))
        assert alone.tiers[0].peak == two.tiers[0].peak == four.tiers[0].peak
        assert [entry.key for entry in two.changes] == [entry.key for entry in alone.changes]
        assert not any("measured" in note for note in alone.notes)
        for found in (two, four):
            assert any("never been measured" in note for note in found.notes)

    def test_main_memory_holds_shared_things_once_and_the_rest_for_each(self) -> None:
        staged = [{"id": "data", "path": "/nowhere", "type": "in_memory", "max_samples": 1000}]
        found = {count: several(count, datasets=staged)[0] for count in (1, 2, 4)}
        for name in ("files of data", "latents of data", "captions"):
            assert sized(found[1], name) == sized(found[2], name) == sized(found[4], name)
        assert "one copy for 4 ranks" in next(line.why for line in found[4].lines if line.name == "captions")
        for count in (1, 2, 4):
            assert sized(found[count], "process") == count * 4 * GIB
            assert sized(found[count], "checkpoints") == sized(found[1], "checkpoints")

    def test_parked_experts_count_per_process(self) -> None:
        tight = {count: plan(demand(processes=Processes(count, count), **FULL), with_gpus(small_gpu(60), count))
                 for count in (1, 4)}  # fmt: skip
        for name in ("low-noise expert", "high-noise expert, home copy"):
            assert sized(tight[4], name) == 4 * sized(tight[1], name)
        line = next(line for line in tight[4].lines if line.name == "low-noise expert")
        assert (line.tier, line.processes) == ("host", 4)
        assert "4 processes, 26.6 GiB each" in line.why

    def test_that_can_be_too_much_for_main_memory(self) -> None:
        whole = with_gpus(small_gpu(60, cpu_mem_available=300 * GIB), 8)
        assert plan(demand(processes=Processes.on(whole, 1), **FULL), whole).verdict == "fits"
        eight = plan(demand(processes=Processes.on(whole, 8), **FULL), whole)
        assert eight.verdict != "fits"

    def test_the_smallest_gpu_counts_and_an_unknown_one_is_unknown(self) -> None:
        whole = with_gpus(machine("x86-h200"), 2)
        small = whole.gpus[1].model_copy(update={"memory_total": 60 * GIB, "memory_free": None})
        mixed = whole.model_copy(update={"gpus": (whole.gpus[0], small)})
        assert plan(demand(processes=Processes(2, 2)), mixed).tiers[0].tier.capacity == 60 * GIB
        assert plan(demand(), mixed).tiers[0].tier.capacity == whole.gpus[0].memory_total
        silent = whole.gpus[1].model_copy(update={"memory_total": None})
        unknown = plan(
            demand(processes=Processes(2, 2)), whole.model_copy(update={"gpus": (whole.gpus[0], silent)})
        )  # fmt: skip
        assert unknown.missing == ("gpus[1].memory_total",)

    def test_processes_of_a_machine_divide_its_arena_and_share_no_managed_cache(self) -> None:
        section = {"memory": {"use_uvm": True, "enable_uvm_hints": True}, "training": {
            "gradient_checkpointing": "full", "batch_size": 60}}  # fmt: skip
        alone, _ = several(1, "gh200-numa", **section)
        two, _ = several(2, "gh200-numa", **section)
        assert alone.managed_bytes == 2 * WAN.parameters * 2 + sized(alone, "latents of data") + sized(
            alone, "captions"
        )
        assert two.managed_bytes == 2 * WAN.parameters * 2
        overflow = [line for line in two.lines if line.overflow]
        assert overflow
        assert all(line.processes == 2 for line in overflow)
        assert sum(line.bytes for line in overflow) == 2 * two.spilled_bytes


class TestSharded:
    @pytest.mark.parametrize("count", [2, 4])
    def test_weights_gradients_and_state_are_divided(self, count: int) -> None:
        (alone, whole), (found, parts) = several(1), several(count, sharded=True)
        assert sized(found, "high-noise expert") == pytest.approx(sized(alone, "high-noise expert") / count, abs=count)
        for name in ("lora", "gradients", "optimizer (adamw)"):
            assert sized(parts, name) == pytest.approx(sized(whole, name) / count, rel=0.01)
            assert f"1/{count} in each process" in next(need.why for need in parts.needs if need.name == name)
        assert sized(found, "activations") == sized(alone, "activations")
        block = 2 * sum(linear.weights for linear in WAN.blocks[0].linears)
        around = 2 * (WAN.parameters - WAN.linear_weights)
        gathered = sized(found, "gathered weights")
        assert gathered == pytest.approx(GATHERED_BLOCKS * block + around, rel=0.02)
        assert found.tiers[0].peak < alone.tiers[0].peak

    def test_each_process_loads_a_whole_expert_before_sharding(self) -> None:
        """So a denoiser that is too large for one GPU does not fit on any number of them."""
        _, parts = several(4, sharded=True)
        assert parts.phases == ("encode text", "encode latents", "load", "train")
        assert sized(parts, "denoiser before sharding") > 2 * WAN.parameters
        wanted = demand(processes=Processes(64, 8, sharded=True), **FULL)
        found = plan(wanted, with_gpus(small_gpu(24), 8))
        assert found.verdict == "does not fit"

    def test_sharded_experts_are_never_parked(self) -> None:
        """FSDP2 keeps its shards; parking would leave it with freed tensors."""
        wanted = demand(processes=Processes(2, 2, sharded=True), **FULL)
        found = plan(wanted, with_gpus(small_gpu(45), 2))
        assert "placement: idle expert" not in {entry.key for entry in found.changes}
        assert tier_of(found, "low-noise expert") == "device"
        assert change(found, "placement: encoders").automatic

    def test_without_resharding_every_block_stays_whole(self) -> None:
        kept, _ = (demand(processes=Processes(4, 4, sharded=True, reshard=reshard)) for reshard in (False, True))
        assert sized(kept, "gathered weights") > 2 * WAN.parameters

    def test_a_full_fine_tune(self) -> None:
        model = {"model": {"family": "wan", "experts": "high"}, "adapter": {"kind": "full_finetune"}}
        whole, parts = (several(count, sharded=count > 1, **model)[1] for count in (1, 8))
        assert parts.denoisers[0].size("trained") == pytest.approx(whole.denoisers[0].size("trained") / 8, rel=1e-6)
        assert sized(parts, "optimizer (adamw)") == pytest.approx(sized(whole, "optimizer (adamw)") / 8, rel=0.01)
        assert sized(parts, "compute copy") == sized(whole, "compute copy"), "autograd keeps every cast"

    def test_fp8_is_rejected_as_the_run_rejects_it(self) -> None:
        with pytest.raises(ConfigError, match="fp8 weights cannot be sharded"):
            demand(model={"family": "wan", "base_precision": "fp8"}, processes=Processes(2, 2, sharded=True))
        tight = plan(demand(processes=Processes(2, 2, sharded=True), **FULL), with_gpus(small_gpu(20), 2))
        assert "model.base_precision" not in {entry.key for entry in tight.changes}


class TestProcesses:
    def test_one_process_per_gpu_on_as_many_machines_as_needed(self) -> None:
        one, two = machine("gh200-numa"), machine("gb200")
        assert Processes.on(one, 4) == Processes(4, 1)
        assert Processes.on(two, 4, sharded=True) == Processes(4, 2, sharded=True)
        assert (Processes.on(two, 4).machines, Processes.on(two, 3).machines) == (2, 2)
        assert Processes.on(machine("cpu-only"), 4) == Processes(4, 4)
        assert Processes.on(two, 1, sharded=True) == Processes()
        assert Processes.on(two, 4).words == "4 processes on 2 machines like this one: DDP, each holds a whole copy"

    def test_tensors_are_split_as_fsdp_splits_them(self) -> None:
        """By the first dimension, and the first process takes the larger part (`torch.chunk`)."""
        for shape, count in (((16, 5120), 4), ((5, 3), 2), ((3,), 8), ((1, 7, 7), 4)):
            (local,) = Processes(count, count, sharded=True).local((Tensors(shape, 2),))
            assert local == Tensors(tuple(torch.zeros(shape).chunk(count)[0].shape), 2)


# -- what torch does --------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """The peak of the bytes alive after any operation, over the tensors seen so far."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, StorageWeakRef] = {}
        self._see(seen)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._see(tree_leaves((args, kwargs, result)))
        self.peak = max(self.peak, self._alive())
        return result

    def _see(self, values: list[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                storage = value.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage)

    def _alive(self) -> int:
        self._storages = {key: one for key, one in self._storages.items() if not one.expired()}
        held = [torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in self._storages.values()]
        return sum(storage.nbytes() for storage in held if storage is not None)


class Block(nn.Module):
    """Frozen matrices and a small adapter, as in a run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 4 * width, bias=False).requires_grad_(False)
        self.narrow = nn.Linear(4 * width, width, bias=False).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.zeros(width, 8)), nn.Parameter(torch.zeros(8, width))

    def forward(self, values: Tensor) -> Tensor:
        changed: Tensor = self.narrow(torch.relu(self.wide(values))) + values @ self.down @ self.up
        return values + changed


@pytest.fixture
def four_processes() -> Iterator[Any]:
    """Rank 0 of four processes; the others send nothing, and no collective waits for them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield init_device_mesh("cpu", (4,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("reshard", [True, False])
def test_torch_holds_the_counted_number_of_whole_blocks(four_processes: Any, reshard: bool) -> None:
    model = nn.Sequential(*(Block(256) for _ in range(8)))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    block = whole // len(model)
    for module in (*model, model):
        fully_shard(module, mesh=four_processes, reshard_after_forward=reshard)
    parts = [one.to_local() for one in model.parameters() if isinstance(one, DTensor)]
    share = sum(one.nbytes for one in parts)
    assert share == whole // 4
    values = torch.randn(2, 256)
    with Watch(parts) as watch:
        loss = model(values).sum()
        forward, watch.peak = watch.peak, 0
        loss.backward()
    counted = GATHERED_BLOCKS * block if reshard else whole + (GATHERED_BLOCKS - 1) * block
    assert forward - share == pytest.approx(counted, rel=0.03)
    assert watch.peak < forward
