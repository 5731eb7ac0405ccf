"""Frozen linear layers in int8: their values, both passes, and the distance to bf16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gracetune.adapters.attach import attach
from gracetune.config.run_config import Adapter
from gracetune.models.eight_bit_linear import Int8Linear
from unit.models.test_fp8 import both_ways, distance, plain, rows


def held(layer: nn.Linear) -> Int8Linear:
    return Int8Linear(layer.weight, layer.bias)


def same_numbers(layer: Int8Linear) -> nn.Linear:
    """A plain layer with the weight that `layer` multiplies with."""
    other = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None).bfloat16()
    with torch.no_grad():
        other.weight.copy_(layer.weight)
        if layer.bias is not None:
            other.bias.copy_(layer.bias)
    return other.requires_grad_(False)


def test_rounding_error_is_at_most_half_a_step() -> None:
    weight = rows(40, 64).float() * torch.logspace(-20, 20, 40, base=2)[:, None]
    layer = Int8Linear(weight, None)
    assert layer.int8_values.dtype == torch.int8
    back = layer.int8_values.float() * layer.int8_scales
    assert ((back - weight).abs() <= layer.int8_scales * 0.501).all()
    assert torch.equal(layer.int8_values.abs().amax(dim=1), torch.full((40,), 127, dtype=torch.int8))


def test_zeros_stay_zeros_and_nonfinite_values_propagate() -> None:
    weight = torch.zeros(3, 8)
    weight[1, 2], weight[2] = torch.inf, 1.0
    found = Int8Linear(weight, None).weight
    assert torch.equal(found[0], torch.zeros(8, dtype=torch.bfloat16))
    assert not found[1].isfinite().any()
    assert torch.equal(found[2], torch.ones(8, dtype=torch.bfloat16))


@pytest.mark.parametrize("bias", [True, False])
def test_both_passes_equal_a_dequantized_layers(bias: bool) -> None:
    layer = held(plain(bias=bias))
    x, gradient = rows(2, 7, 96), rows(2, 7, 160, seed=2)
    ours, theirs = both_ways(layer, x, gradient), both_ways(same_numbers(layer), x, gradient)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_sides_need_not_be_multiples_of_anything() -> None:
    layer = held(plain(7, 5))
    assert layer(rows(3, 7)).shape == (3, 5)


def test_it_is_closer_to_bf16_than_fp8_is() -> None:
    layer, x, gradient = plain(256, 256), rows(64, 256), rows(64, 256, seed=2)
    ours, exact = both_ways(held(layer), x, gradient), both_ways(layer, x, gradient)
    assert distance(ours[0], exact[0]) < 0.012
    assert distance(ours[1], exact[1]) < 0.012


def test_casting_the_model_keeps_the_values() -> None:
    layer = held(plain())
    before = layer.weight
    again = nn.Sequential(layer).to(torch.float16)[0]
    assert isinstance(again, Int8Linear)
    assert (again.int8_values.dtype, again.int8_scales.dtype) == (torch.int8, torch.float32)
    assert torch.equal(again.weight, before)
    assert again.bias is not None
    assert again.bias.dtype == torch.float16
    assert again(rows(2, 96).half()).dtype == torch.float16


def test_autocast_decides_the_output_dtype() -> None:
    layer, x = held(plain()), rows(2, 96)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x.float())
    assert torch.equal(found, layer(x))


def test_step_saves_nothing_of_its_input() -> None:
    layer, x = held(plain()), rows(4, 96).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    assert {one.data_ptr() for one in kept} == {layer.int8_values.data_ptr(), layer.int8_scales.data_ptr()}


@pytest.mark.parametrize("kind", ["lora", "dora", "lokr", "loha"])
def test_adapters_get_the_gradients_of_a_dequantized_layer(kind: str) -> None:
    grads = []
    for base in (held(plain()), same_numbers(held(plain()))):
        model = nn.Sequential(base)
        attached = attach(
            model, Adapter.model_validate({"kind": kind, "rank": 4}), family="wan", default_targets=("0",), seed=1
        )
        with torch.no_grad():
            for number, parameter in enumerate(attached.parameters().values()):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.02)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            checkpoint(model, rows(5, 96).requires_grad_(), use_reentrant=False).float().square().mean().backward()
        grads.append(torch.cat([one.grad.flatten() for one in attached.parameters().values() if one.grad is not None]))
    assert grads[0].abs().sum() > 0
    assert F.cosine_similarity(grads[0], grads[1], dim=0) > 0.9999
    assert distance(grads[0], grads[1]) < 0.01


@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_compiled_graph_saves_no_16_bit_weight(budget: float) -> None:
    """torch's partitioner would otherwise save it instead of dequantizing twice."""
    torch._dynamo.reset()
    layers = nn.Sequential(held(plain(96, 96)), nn.GELU(), held(plain(96, 96)))
    with torch._functorch.config.patch(activation_memory_budget=budget):
        compiled = torch.compile(layers, backend="aot_eager_decomp_partition", fullgraph=True)
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
            answer = compiled(rows(5, 96).requires_grad_())
        answer.float().square().sum().backward()
    assert any(one.dtype == torch.int8 for one in kept)
    assert not [one.shape for one in kept if one.shape == (96, 96) and one.dtype != torch.int8]


def test_a_compiled_graph_computes_the_same() -> None:
    layer, x, gradient = held(plain()), rows(5, 96), rows(5, 160, seed=2)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    ours, theirs = both_ways(compiled, x, gradient), both_ways(layer, x, gradient)  # type: ignore[arg-type]
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
