"""The processes of one run: rank, device, collectives, sharding. No other module imports accelerate.

`accelerate launch` or `torchrun` starts the processes; without a launcher there is one. accelerate sets up the process
group and the device. Sharding uses torch's `fully_shard` directly, because accelerate's `prepare` silently replaces
FSDP by plain replicas on a CPU.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gracetune.config.environment import Environment
from gracetune.errors import ConfigError, MachineError, Problem
from gracetune.seeded_random import random_bits
from gracetune.train.rank_monitor import RankMonitor

Precision = Literal["bf16", "fp16", "fp32"]
T = TypeVar("T")

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ON = ("1", "true", "yes", "on")
_TIMEOUT = timedelta(hours=12)
"""Timeout of collectives between steps: rank 0 may encode or generate for hours while the others have nothing to do.
`RankMonitor` reports long waits."""
_STEP_TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives within a step, where all ranks do the same work."""
_UNSUPPORTED: tuple[tuple[str, str], ...] = (
    ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
    ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
)


@dataclass(frozen=True)
class LaunchEnvironment:
    """The settings in the launcher's environment variables."""

    sharded: bool = False
    reshard: bool = True
    """Whether a block's gathered weights are freed between its forward and its backward pass (ZeRO-3)."""
    notes: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environment: Environment, precision: Precision) -> LaunchEnvironment:
        problems = [
            Problem(name, program, "replicas (MULTI_GPU) or FSDP2", "launch with config/accelerate_config_gh200.yaml")
            for name, program in _UNSUPPORTED
            if _is_on(environment.get(name))
        ]
        sharded = _is_on(environment.get("ACCELERATE_USE_FSDP"))
        if sharded:
            problems += _fsdp_problems(environment)
        if problems:
            raise ConfigError(problems)
        notes = []
        given = environment.get("ACCELERATE_MIXED_PRECISION")
        ours = "no" if precision == "fp32" else precision
        if given is not None and given != ours:
            notes.append(
                f"mixed precision: {precision} by training.mixed_precision; accelerate's configuration says {given}"
            )
        reshard = environment.get("FSDP_RESHARD_AFTER_FORWARD")
        return cls(sharded, reshard is None or reshard.lower() in (*_ON, "full_shard"), tuple(notes))


def _fsdp_problems(environment: Environment) -> list[Problem]:
    problems = []
    hint = "launch with config/accelerate_config_gh200_fsdp.yaml"
    version = environment.get("FSDP_VERSION") or "1"
    if version != "2":
        problems.append(Problem("fsdp_version", version, "2", hint))
    if _is_on(environment.get("FSDP_OFFLOAD_PARAMS")):
        expected = "false: weights that do not fit are what --set memory.use_uvm=true is for"
        problems.append(Problem("fsdp_offload_params", "true", expected, hint))
    return problems


def _is_on(value: str | None) -> bool:
    return value is not None and value.strip().lower() in _ON


class Runtime:
    """One process of a run, made by `open_runtime`. Every rank must call its collectives in the same order."""

    def __init__(
        self, *, rank: int, world_size: int, local_rank: int, local_world_size: int, device: torch.device,
        precision: Precision, launch: LaunchEnvironment, key: str, store_in_rank_0: bool = True,
    ) -> None:  # fmt: skip
        self.rank, self.world_size = rank, world_size
        self.local_rank, self.local_world_size = local_rank, local_world_size
        self.device = device
        self.precision = precision
        self.launch = launch
        self.key = key
        """Identifies this launch: equal on all its ranks, different in every other launch."""
        self._mesh: Any = None
        # Ranks exchange host values over gloo, so that these collectives do not synchronize with a GPU.
        self._host_group: Any = dist.new_group(backend="gloo", timeout=_TIMEOUT) if world_size > 1 else None
        self.peers: RankMonitor | None = None
        """None for a single process."""
        if world_size > 1:
            store = dist.distributed_c10d._get_default_store()
            self.peers = RankMonitor(store, rank, world_size, store_in_rank_0=store_in_rank_0)
            self.barrier()
            self.peers.start()

    @property
    def processes_in_words(self) -> str:
        """`2 processes on 1 node`"""
        nodes = -(-self.world_size // self.local_world_size)
        counts = ((self.world_size, "process", "processes"), (nodes, "node", "nodes"))
        return " on ".join(f"{count} {one if count == 1 else several}" for count, one, several in counts)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def autocast(self) -> AbstractContextManager[object]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=_DTYPES[self.precision])

    def seed(self, seed: int) -> None:
        """Seed the global generators, which libraries use. Our own random values are functions of (seed, sample)."""
        own = random_bits(seed, "process", self.rank)
        random.seed(own)
        np.random.seed(own % (1 << 32))
        torch.manual_seed(own >> 1)

    # -- agreement ----------------------------------------------------------------------------------------------------

    def _collective(self) -> AbstractContextManager[None]:
        return nullcontext() if self.peers is None else self.peers.collective()

    def sum_(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place, on the tensor's device."""
        if self.world_size > 1:
            with self._collective():
                dist.all_reduce(tensor)

    def barrier(self) -> None:
        if self.world_size > 1:
            with self._collective():
                dist.barrier(group=self._host_group)

    def from_main(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 and broadcast its result. An error on rank 0 is raised on every rank."""
        if self.world_size == 1:
            return make()
        box: list[Any] = [None, None]
        failure: Exception | None = None
        if self.is_main:
            try:
                box[0] = make()
            except Exception as error:  # noqa: BLE001 - the others wait for the broadcast; raised again below
                failure, box[1] = error, str(error) or type(error).__name__
        with self._collective():
            dist.broadcast_object_list(box, group=self._host_group)
        if failure is not None:
            raise failure
        if box[1] is not None:
            raise MachineError(f"rank 0 stopped: {box[1]}")
        result: T = box[0]
        return result

    def highest(self, value: int) -> int:
        """The maximum over all ranks. The collective runs on the CPU and does not synchronize with a GPU."""
        if self.world_size == 1:
            return value
        gathered = torch.tensor([value])
        with self._collective():
            dist.all_reduce(gathered, op=dist.ReduceOp.MAX, group=self._host_group)
        return int(gathered.item())

    def all_of(self, mine: T | None) -> list[T]:
        """All ranks' values that are not None, in the order of the ranks, on every rank.

        In the common case that all are None, this costs one small reduction.
        """
        if not self.highest(int(mine is not None)):
            return []
        boxes: list[Any] = [mine] * self.world_size
        if self.world_size > 1:
            with self._collective():
                dist.all_gather_object(boxes, mine, group=self._host_group)
        return [one for one in boxes if one is not None]

    def gather(self, mine: bytes) -> list[bytes]:
        """All ranks' values on rank 0, and an empty list on the others (`checkpoint.state_parts.Ranks`)."""
        if self.world_size == 1:
            return [mine]
        boxes: list[Any] | None = [b""] * self.world_size if self.is_main else None
        with self._collective():
            dist.gather_object(mine, boxes, group=self._host_group)
        return boxes or []

    # -- sharding -----------------------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        return self.launch.sharded

    def shard(self, model: nn.Module, blocks: Iterable[str]) -> None:
        """Shard the weights over all ranks (FSDP2): first each repeated block, then the rest of the model."""
        self.barrier()  # ranks may have read the weights at different speeds
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if self._mesh is None:
            self._mesh = init_device_mesh(self.device.type, (self.world_size,))
        names = set(blocks)
        options: dict[str, Any] = {"mesh": self._mesh, "reshard_after_forward": self.launch.reshard}
        for module in model.modules():
            if type(module).__name__ in names:
                fully_shard(module, **options)
        fully_shard(model, **options)

    def reshard(self, model: nn.Module) -> None:
        """Free the weights gathered for a forward pass that has no backward pass."""
        if self.is_sharded:
            from torch.distributed.fsdp import FSDPModule

            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors with rank 0's values."""
        if self.world_size > 1:
            self.barrier()
            with self._collective():
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

    # -- the end ------------------------------------------------------------------------------------------------------

    def explain(self, error: BaseException) -> BaseException:
        """The error to raise in place of `error`, which may be the effect of a lost rank (`RankMonitor.explain`)."""
        return error if self.peers is None else self.peers.explain(error)

    def close(self) -> None:
        if self.world_size > 1 and dist.is_initialized():
            # gloo's threads release their last work, under Python's lock, a moment after it is done. If the group is
            # destroyed before that, the process aborts.
            time.sleep(0.05)
            self._host_group = None
            dist.destroy_process_group()
            _forget_state()
        if self.peers is not None:
            self.peers.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self.barrier()  # so that a rank that ends first is not taken for lost
        except RuntimeError as failed:
            error = failed
        found = None if error is None else self.explain(error)
        self.close()
        if found is not None and found is not error:
            raise found from None


def check_launch(environment: Environment, precision: Precision) -> LaunchEnvironment:
    """Raise ConfigError if the launcher's settings are unsupported here. Opens nothing."""
    launch = LaunchEnvironment.from_environment(environment, precision)
    _check_devices(environment, cpu=not torch.cuda.is_available())
    return launch


def open_runtime(precision: Precision, environment: Environment) -> Runtime:
    """Open the process group and return this process's runtime."""
    from accelerate import PartialState

    launch = check_launch(environment, precision)
    cpu = not torch.cuda.is_available()
    several = environment.get("WORLD_SIZE") is not None and environment.get("RANK") is not None
    state = PartialState(cpu=cpu, **({"timeout": _STEP_TIMEOUT} if several else {}))
    if launch.sharded and state.num_processes == 1 and not dist.is_initialized():
        launch = LaunchEnvironment(
            sharded=False,
            reshard=launch.reshard,
            notes=(*launch.notes, "FSDP: one process has nothing to share; not sharded"),
        )
    local = environment.get("LOCAL_WORLD_SIZE")
    device = state.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return Runtime(
        rank=state.process_index,
        world_size=state.num_processes,
        local_rank=state.local_process_index,
        local_world_size=int(local) if local else state.num_processes,
        device=device,
        precision=precision,
        launch=launch,
        key=_launch_key(environment),
        store_in_rank_0=not _is_on(environment.get("TORCHELASTIC_USE_AGENT_STORE")),
    )


def _launch_key(environment: Environment) -> str:
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    return ":".join(environment.get(name) or "" for name in names)


def _check_devices(environment: Environment, *, cpu: bool) -> None:
    local = int(environment.get("LOCAL_WORLD_SIZE") or 1)
    if cpu or local <= torch.cuda.device_count():
        return
    found = f"{local} processes on this machine, {torch.cuda.device_count()} GPUs"
    hint = f"accelerate launch --num_processes {torch.cuda.device_count()} ..."
    raise ConfigError([Problem("--num_processes", found, "at most one process for each GPU", hint)])


def _forget_state() -> None:
    """Reset accelerate's process-wide state, so that the same process can start another run."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(True)
    PartialState._reset_state()
