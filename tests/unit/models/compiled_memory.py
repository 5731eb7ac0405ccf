"""What torch.compile saves of a block for the backward pass, from its own partitioner on the real block.

The block is traced with fake tensors at its real size, so nothing is computed and no memory is needed; the joint graph
goes through Inductor's passes and the min-cut partitioner as in a real compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F


@torch.library.custom_op("gracetune_tests::attention", mutates_args=())
def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("gracetune_tests::attention_backward", mutates_args=())
def _attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_attention.register_fake(
    lambda query, key, value: (torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32))
)
_attention_backward.register_fake(
    lambda gradient, query, key, value, output, rows: (
        torch.empty_like(query),
        torch.empty_like(key),
        torch.empty_like(value),
    )
)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, gradient: torch.Tensor, _rows: torch.Tensor) -> Any:
    return _attention_backward(gradient, *ctx.saved_tensors)


_attention.register_autograd(_differentiate, setup_context=_remember)


def use_opaque_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """One opaque attention operator, like the fused ones on a GPU."""
    from diffusers.models.transformers import transformer_flux, transformer_wan

    from gracetune.models.qwen_image import attention as of_qwen
    from gracetune.models.z_image import attention as of_z_image

    def heads_first(query: Any, key: Any, value: Any, *_mask: Any, **_rest: Any) -> Any:
        swapped = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return _attention(*swapped)[0].transpose(1, 2)

    for module in (transformer_flux, of_qwen, of_z_image, transformer_wan):
        monkeypatch.setattr(module, "dispatch_attention_fn", lambda q, k, v, **_rest: _attention(q, k, v)[0])
    monkeypatch.setattr(F, "scaled_dot_product_attention", heads_first)


def use_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own operator. A memory budget goes to what takes longest to recompute; torch knows its cost."""
    from diffusers.models.transformers import transformer_flux, transformer_wan

    from gracetune.models.qwen_image import attention as of_qwen
    from gracetune.models.z_image import attention as of_z_image

    def heads_first(query: Any, key: Any, value: Any, *_mask: Any, **_rest: Any) -> Any:
        return FLASH(query, key, value, 0.0, False, False)[0]

    def tokens_first(query: Any, key: Any, value: Any, **_rest: Any) -> Any:
        return heads_first(*(tensor.transpose(1, 2) for tensor in (query, key, value))).transpose(1, 2)

    for module in (transformer_flux, of_qwen, of_z_image, transformer_wan):
        monkeypatch.setattr(module, "dispatch_attention_fn", tokens_first)
    monkeypatch.setattr(F, "scaled_dot_product_attention", heads_first)


FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
_VIEWS = {
    torch.ops.aten.permute.default,
    torch.ops.aten.view.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.alias.default,
}


def kept_by_compiler(
    build: Callable[[], nn.Module], call: Callable[[nn.Module], Any], *, batch: int, budget: float = 1.0
) -> int:
    return split_by_compiler(build, call, batch=batch, budget=budget)[0]


def split_by_compiler(
    build: Callable[[], nn.Module], call: Callable[[nn.Module], Any], *, batch: int, budget: float = 1.0
) -> tuple[int, Any]:
    """Bytes kept for the backward pass (what the graph saves, and those of its inputs that carry a batch), and that
    pass as a graph."""
    kept: dict[str, torch.Tensor] = {}
    passes: list[Any] = []

    def partition(joint: Any, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        joint_graph_passes(joint)
        forward, backward = min_cut_rematerialization_partition(
            joint, joint_inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **options
        )
        outputs = next(node for node in forward.graph.nodes if node.op == "output").args[0]
        kept.update(_activations(outputs[num_fwd_outputs:], batch))
        passes.append(backward.graph)
        return forward, backward

    with FakeTensorMode(allow_non_fake_inputs=True), functorch_config.patch(activation_memory_budget=budget):
        block = build()
        names, weights = zip(*block.named_parameters(), strict=True)
        trace, arguments = _as_function(block, names, call)
        compiled = aot_function(
            trace,
            fw_compiler=lambda graph, _inputs: graph,
            bw_compiler=lambda graph, _inputs: graph,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )
        compiled(*weights, *arguments)
    return sum(tensor.numel() * tensor.element_size() for tensor in kept.values()), passes[0]


def _as_function(
    block: nn.Module, names: Sequence[str], call: Callable[[nn.Module], Any]
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """`call` says which tensors the block is given; the traced function takes them behind the weights."""
    inputs, keywords = call(block)
    flat, spec = torch.utils._pytree.tree_flatten((inputs, keywords))
    places = [place for place, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]

    def trace(*arguments: torch.Tensor) -> Any:
        weights = dict(zip(names, arguments, strict=False))
        leaves = list(flat)
        for place, tensor in zip(places, arguments[len(names) :], strict=True):
            leaves[place] = tensor
        given, named = torch.utils._pytree.tree_unflatten(leaves, spec)
        return torch.func.functional_call(block, weights, given, named)

    return trace, [flat[place] for place in places]


def _activations(nodes: Sequence[Any], batch: int) -> dict[str, torch.Tensor]:
    """Views of weights count as weights. All other inputs have a batch dimension, flattened into rows or not."""
    found = {}
    for node in nodes:
        root = node
        while root.op == "call_function" and root.target in _VIEWS:
            root = root.args[0]
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] % batch == 0:
            is_weight = root.op == "placeholder" and value.dim() < 3
            if not is_weight and not (root.op == "call_function" and _is_cast_weight(root)):
                found[root.name] = value
    return found


def _is_cast_weight(node: Any) -> bool:
    """An adapter's fp32 weight, cast to the compute dtype. It is counted with the adapter."""
    return node.target is torch.ops.prims.convert_element_type.default and node.args[0].op == "placeholder"
