"""The processes of a run, and what each of them holds. Pure functions.

With replicas (DDP) every process holds everything. With sharding (FSDP2, `Runtime.shard`) every process holds its shard
of each denoiser, frozen weights included, and torch gathers one block at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gracetune.adapters.trainable import Tensors
from gracetune.errors import Problem
from gracetune.hardware.machine import Machine

GATHERED_BLOCKS = 3
"""Whole blocks that torch's `fully_shard` holds at once in the forward pass: the block that computes, the buffer it was
gathered into, and the buffer of its predecessor or successor. The backward pass holds one less. Tests count them."""
REDUCED_BLOCKS = 2
"""Whole block gradients held at once in the backward pass: the ones just computed, and the buffer being reduced."""


@dataclass(frozen=True)
class Processes:
    """Number and kind of the processes of a run."""

    count: int = 1
    per_machine: int = 1
    """Processes that share the main memory of one machine; each has its own GPU."""
    sharded: bool = False
    reshard: bool = True
    """With sharding: free a block's gathered weights between its forward and its backward pass."""

    @classmethod
    def on(cls, machine: Machine, count: int, *, sharded: bool = False) -> Processes:
        """`count` processes on machines like `machine`, one per GPU. Without a GPU they all run on one machine."""
        per_machine = min(count, len(machine.gpus)) if machine.gpus else count
        return cls(count, per_machine, sharded and count > 1)

    @property
    def machines(self) -> int:
        return math.ceil(self.count / self.per_machine)

    @property
    def words(self) -> str | None:
        """A description for the plan; None for a single process."""
        if self.count == 1:
            return None
        kind = f"FSDP2, each holds 1/{self.count} of the weights" if self.sharded else "DDP, each holds a whole copy"
        location = f" on {self.machines} machines like this one" if self.machines > 1 else ""
        return f"{self.count} processes{location}: {kind}"

    @property
    def part(self) -> str:
        """Suffix that marks the size of one shard."""
        return f"; 1/{self.count} in each process" if self.sharded else ""

    def share(self, size: int) -> int:
        """One process's share of frozen weights. Their matrices have many rows, so shards are nearly equal."""
        return math.ceil(size / self.count) if self.sharded else size

    def local(self, tensors: tuple[Tensors, ...]) -> tuple[Tensors, ...]:
        """The shards of the first process, which holds most: FSDP2 splits along the first dimension."""
        if not self.sharded:
            return tensors
        return tuple(
            replace(one, shape=(math.ceil(one.shape[0] / self.count), *one.shape[1:])) for one in tensors if one.shape
        )


ONE_PROCESS = Processes()


def sharded_bits_problem(held: str) -> Problem:
    found, expected = (
        f"{held}, with weights sharded over processes (FSDP)",
        f"replicas: {held} weights cannot be sharded",
    )
    hint = "launch with config/accelerate_config_gh200.yaml, or --set model.base_precision=bf16"
    return Problem("model.base_precision", found, expected, hint)


def sharded_state_problem(home: str) -> Problem:
    found = f"{home}, with weights sharded over processes (FSDP)"
    hint = "launch with config/accelerate_config_gh200.yaml, or --set optimizer.state.home=auto"
    return Problem("optimizer.state.home", found, "replicas: a sharded state has no home of its own", hint)
