"""What torch.compile keeps of a block for the backward pass, decided by torch's own partitioner.

The block is traced with fake tensors, so nothing is computed and no memory is needed. The joint graph goes through
Inductor's passes and the min-cut partitioner, as in a real compilation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses.fake_tensor import FakeTensorMode

from gracetune.planning.tracing.calls import BlockCall, training
from gracetune.planning.tracing.operators import TracedDevice, operators_of

_VIEWS = frozenset(
    {
        torch.ops.aten.permute.default, torch.ops.aten.view.default, torch.ops.aten.unsqueeze.default,
        torch.ops.aten.squeeze.dim, torch.ops.aten.slice.Tensor, torch.ops.aten.alias.default,
        torch.ops.aten.t.default, torch.ops.aten.transpose.int, torch.ops.aten.expand.default,
        torch.ops.aten.reshape.default,
    }
)  # fmt: skip
_PRODUCTS = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.bmm.default: (0, 1),
}
"""Matrix product -> the positions of its input and its weight."""


@dataclass(frozen=True)
class CompiledRun:
    """What one partition keeps, without weights and the arguments that all blocks share."""

    kept: Mapping[str, tuple[int, int]]
    """Node -> bytes, and bytes per element."""
    inputs: Mapping[str, str]
    """Linear layer -> the node that it reads."""
    gradient_inputs: Collection[str]
    """Nodes of the block's arguments that need gradients: what the block before it returned."""

    @property
    def total(self) -> int:
        return sum(size for size, _ in self.kept.values())


def run_compiled(
    block: nn.Module, call: BlockCall, trained: Collection[str] | None, linears: Collection[str],
    device: TracedDevice, budget: float = 1.0,
) -> CompiledRun:  # fmt: skip
    """Partition a block whose layers `trained` are trained. None: everything is.

    The tensors are fake ones on the CPU; `device` decides which operators the graph uses, as on that device.
    """
    seen: list[CompiledRun] = []

    def partition(joint: Any, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        joint_graph_passes(joint)
        forward, backward = min_cut_rematerialization_partition(
            joint, joint_inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **options
        )
        seen.append(_read(forward.graph, num_fwd_outputs, names, arguments, linears))
        return forward, backward

    with FakeTensorMode(allow_non_fake_inputs=True), functorch_config.patch(activation_memory_budget=budget):
        with training(block, trained):
            weights = {
                name: torch.empty(one.shape, dtype=one.dtype).requires_grad_(one.requires_grad)
                for name, one in [*block.named_parameters(), *block.named_buffers()]
            }
        names = [*weights]
        flat, _ = call.arguments("cpu")
        places = [place for place, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        arguments = [flat[place] for place in places]

        def traced(*values: Tensor) -> Any:
            leaves = list(flat)
            for place, value in zip(places, values[len(names) :], strict=True):
                leaves[place] = value
            given, named = torch.utils._pytree.tree_unflatten(leaves, call.spec)
            with operators_of(device, compiled=True):
                return torch.func.functional_call(block, dict(zip(names, values, strict=False)), given, named)

        compiled = aot_function(
            traced, fw_compiler=lambda graph, _: graph, bw_compiler=lambda graph, _: graph,
            partition_fn=partition, decompositions=select_decomp_table(),
        )  # fmt: skip
        compiled(*weights.values(), *arguments)
    return seen[0]


def _read(
    graph: Any, outputs: int, names: Sequence[str], arguments: Sequence[Tensor], linears: Collection[str]
) -> CompiledRun:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    by_index = {int(node.name.removeprefix("primals_")) - 1: node for node in placeholders}
    weights = {node.name: names[index] for index, node in by_index.items() if index < len(names)}
    given = {node.name: arguments[index - len(names)] for index, node in by_index.items() if index >= len(names)}
    kept: dict[str, tuple[int, int]] = {}
    for node in next(node for node in graph.nodes if node.op == "output").args[0][outputs:]:
        root, value = _root(node), node.meta.get("val")
        if not isinstance(value, Tensor) or value.dtype == torch.uint64:  # the state of attention's random generator
            continue
        shared = root.name in given and not given[root.name].requires_grad
        if not shared and not _is_of_weights(root, weights):
            held = root.meta["val"]
            kept[root.name] = held.numel() * held.element_size(), held.element_size()
    gradient = {name for name, tensor in given.items() if tensor.requires_grad}
    return CompiledRun(kept, dict(_inputs(graph, weights, linears)), gradient)


def _root(node: Any) -> Any:
    while node.op == "call_function" and node.target in _VIEWS:
        node = node.args[0]
    return node


def _is_of_weights(node: Any, weights: Mapping[str, str]) -> bool:
    """Whether a node is a weight, or computed from weights alone."""
    if node.op == "placeholder":
        return node.name in weights
    return bool(node.all_input_nodes) and all(_is_of_weights(one, weights) for one in node.all_input_nodes)


def _inputs(graph: Any, weights: Mapping[str, str], linears: Collection[str]) -> Iterator[tuple[str, str]]:
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _PRODUCTS:
            read, weight = (node.args[place] for place in _PRODUCTS[node.target])
            layer = weights.get(_root(weight).name, "").removesuffix(".weight")
            if layer in linears:
                yield layer, _root(read).name
