"""How many processes a run has, and what each of them holds. Pure.

Replicas (DDP): every process holds everything. Sharded (FSDP2, `Runtime.shard`): every process holds its part of each
denoiser, frozen weights included, and torch gathers a block at a time from all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gracetune.adapters.trainable import Tensors
from gracetune.errors import Problem
from gracetune.hardware.machine import Machine

GATHERED_BLOCKS = 3
"""Whole blocks that torch's `fully_shard` holds at once in the forward pass: the one that computes, the buffer it was
gathered into, and the buffer of the one before or after it. The backward pass holds one less. Tests count them."""
REDUCED_BLOCKS = 2
"""Blocks' whole gradients at once in the backward pass: those just computed, and the buffer being reduced."""


@dataclass(frozen=True)
class Processes:
    count: int = 1
    per_machine: int = 1
    """Those that share one machine's main memory; each has a GPU of its own."""
    sharded: bool = False
    reshard: bool = True
    """Sharded: a block's whole weights are freed between its forward and its backward pass."""

    @classmethod
    def on(cls, machine: Machine, count: int, *, sharded: bool = False) -> Processes:
        """`count` processes on machines like this one, one for each GPU; without a GPU all of them are on this one."""
        per_machine = min(count, len(machine.gpus)) if machine.gpus else count
        return cls(count, per_machine, sharded and count > 1)

    @property
    def machines(self) -> int:
        return math.ceil(self.count / self.per_machine)

    @property
    def words(self) -> str | None:
        """None for one process."""
        if self.count == 1:
            return None
        kind = f"FSDP2, each holds 1/{self.count} of the weights" if self.sharded else "DDP, each holds a whole copy"
        location = f" on {self.machines} machines like this one" if self.machines > 1 else ""
        return f"{self.count} processes{location}: {kind}"

    @property
    def part(self) -> str:
        """A suffix for sizes that are one process's share."""
        return f"; 1/{self.count} in each process" if self.sharded else ""

    def share(self, size: int) -> int:
        """Of frozen weights: their matrices are large beside the number of processes."""
        return math.ceil(size / self.count) if self.sharded else size

    def local(self, tensors: tuple[Tensors, ...]) -> tuple[Tensors, ...]:
        """As FSDP2 splits them: by their first dimension. The first process holds most."""
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
