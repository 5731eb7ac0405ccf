"""Measure how much of the forward pass torch.compile recomputes in the backward pass.

The compiler decides that when it partitions a block's joint graph into forward and backward. Operations that were in
the joint graph once and are in both parts are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry


class Repeated(CustomPartitionerFn):
    """The compiler's default partitioner, with a count of recomputed FLOPs."""

    def __init__(self) -> None:
        self._forward = self._again = 0

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **settings: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        once = flops_of(gm.graph)
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **settings)
        own = flops_of(forward.graph)
        self._forward += own
        self._again += max(0, own + flops_of(backward.graph) - once)
        return forward, backward

    def uuid(self) -> None:
        """None disables the compiler's cache; cached graphs would not be partitioned and counted."""

    @property
    def share(self) -> float | None:
        """Recomputed share of the forward pass; None if no graph was partitioned."""
        return self._again / self._forward if self._forward else None


def flops_of(graph: fx.Graph) -> int:
    total = 0
    for node in graph.nodes:
        formula = (
            flop_registry.get(node.target.overloadpacket) if isinstance(node.target, torch._ops.OpOverload) else None
        )
        if formula is not None:
            arguments, named = tree_map_only(fx.Node, lambda one: one.meta["val"], (node.args, node.kwargs))
            total += int(formula(*arguments, **named, out_val=node.meta["val"]))
    return total


@contextmanager
def counting() -> Iterator[Repeated]:
    """Count every graph compiled inside the block."""
    found = Repeated()
    with torch._inductor.config.patch(custom_partitioner_fn=found):
        yield found
