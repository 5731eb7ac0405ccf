"""Frozen linear layers in e4m3: their results, the distance to bf16, and access to their weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gracetune.adapters.attach import attach
from gracetune.adapters.merge import merge_module
from gracetune.config.run_config import Adapter
from gracetune.errors import ConfigError
from gracetune.kernels import E4M3, E4M3_MAX
from gracetune.models.eight_bit_linear import Fp8Linear, fp8_product, quantize_rows
from gracetune.models.parking import CopyParking, InlineLane
from gracetune.models.spec import Fp8Layouts

LAYOUTS: tuple[Fp8Layouts, ...] = ("both", "one")


def plain(inputs: int = 96, outputs: int = 160, *, seed: int = 0, bias: bool = True) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias).bfloat16().requires_grad_(False)


def rounded(layer: nn.Linear, layouts: Fp8Layouts = "both") -> Fp8Linear:
    return Fp8Linear(layer.weight, layer.bias, layouts)


def rows(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def distance(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


def both_ways(layer: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    answer = layer(x)
    answer.backward(gradient.to(answer.dtype))
    assert x.grad is not None
    return answer.detach(), x.grad


class TestRounding:
    @settings(deadline=None, max_examples=50)
    @given(st.integers(-30, 30), st.integers(0, 1000))
    def test_rounding_error_is_at_most_half_an_e4m3_step(self, exponent: int, seed: int) -> None:
        x = rows(4, 64, seed=seed).float() * 2.0**exponent
        values, scales = quantize_rows(x)
        assert values.dtype == E4M3
        back = values.float() * scales
        # 3 bits of mantissa: half a step is 1/16; below the smallest normal number the step is that number's.
        bound = (x.abs() / 16).maximum(scales * 2.0**-10) * 1.001
        assert ((back - x).abs() <= bound).all()
        assert torch.equal(values.float().abs().amax(1), torch.full((4,), E4M3_MAX))

    def test_zeros_stay_zeros_and_nan_propagates(self) -> None:
        x = torch.zeros(4, 32)
        x[1, 3], x[2, 3], x[3, 3] = torch.inf, torch.nan, 1e-35
        values, scales = quantize_rows(x)
        back = values.float() * scales
        assert (back[0] == 0).all()
        assert back[1].isnan().any()
        assert back[2].isnan().any()
        assert back[3].isfinite().all()

    def test_torchs_product_accepts_the_layouts_and_agrees(self) -> None:
        values, scales = quantize_rows(rows(24, 96))
        weight, by_output = quantize_rows(rows(64, 96, seed=2))
        bias = rows(64, seed=3)
        ours = fp8_product(values, weight.t(), scales, by_output.t().contiguous(), bias)
        try:
            theirs = torch._scaled_mm(
                values, weight.t(), scale_a=scales, scale_b=by_output.t().contiguous(), bias=bias,
                out_dtype=torch.bfloat16,
            )  # fmt: skip
        except RuntimeError as error:
            if "only support" not in str(error):
                raise
            pytest.skip("torch 2.11 has no product with a scale for each row on a CPU")
        assert distance(ours, theirs) < 1e-3  # sums in another order may round to the neighbour


class TestLayer:
    @pytest.mark.parametrize("layouts", LAYOUTS)
    @pytest.mark.parametrize("bias", [True, False])
    def test_it_multiplies_the_quantized_values(self, layouts: Fp8Layouts, bias: bool) -> None:
        layer = plain(bias=bias)
        ours, x, gradient = rounded(layer, layouts), rows(2, 5, 96), rows(2, 5, 160, seed=2)
        answer, dx = both_ways(ours, x, gradient)
        weight = ours.fp8_values.float() * ours.fp8_scales.t()
        seen = _back(quantize_rows(x.reshape(-1, 96)))
        exact = F.linear(seen, weight, None if layer.bias is None else layer.bias.float()).reshape(2, 5, 160)
        assert answer.dtype == torch.bfloat16
        assert distance(answer, exact) < 4e-3  # the last rounding to bf16
        scaled = _back(quantize_rows(gradient.reshape(-1, 160).float() * ours.fp8_scales))
        assert distance(dx.reshape(-1, 96), scaled @ ours.fp8_values.float()) < 4e-3

    def test_both_layouts_give_the_same_bits(self) -> None:
        layer, x, gradient = plain(), rows(7, 96), rows(7, 160, seed=2)
        for one, two in zip(
            both_ways(rounded(layer, "both"), x, gradient), both_ways(rounded(layer, "one"), x, gradient), strict=True
        ):
            assert torch.equal(one, two)

    def test_how_far_it_is_from_bf16(self) -> None:
        """The error of a frozen layer of Wan's width. The bounds are measurements, rounded up."""
        layer, x, gradient = plain(1024, 1536), rows(256, 1024), rows(256, 1536, seed=2)
        exact = both_ways(layer.float(), x.float(), gradient.float())
        ours = both_ways(rounded(layer), x, gradient)
        for found, wanted in zip(ours, exact, strict=True):
            assert distance(found, wanted) < 0.045
            assert F.cosine_similarity(found.double().flatten(), wanted.double().flatten(), dim=0) > 0.999

    def test_autocast_decides_the_output_dtype(self) -> None:
        ours, x = rounded(plain()), rows(3, 96)
        assert ours(x.float()).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert ours(x.float()).dtype == torch.bfloat16
            assert torch.equal(ours(x.float()), ours(x))
        assert torch.equal(ours(x.float()), ours(x).float())

    @pytest.mark.parametrize("layouts", LAYOUTS)
    def test_step_saves_nothing_of_its_input(self, layouts: Fp8Layouts) -> None:
        ours, x = rounded(plain(), layouts), rows(64, 96).requires_grad_()
        own = {buffer.data_ptr() for buffer in ours.buffers()}
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda one: one):
            ours(x)
        assert kept
        assert {tensor.data_ptr() for tensor in kept} <= own

    @pytest.mark.parametrize("layouts", LAYOUTS)
    def test_a_compiler_sees_one_graph_and_the_same_numbers(self, layouts: Fp8Layouts) -> None:
        ours = rounded(plain(), layouts)
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
        for tokens in (6, 10):
            x, gradient = rows(2, tokens, 96), rows(2, tokens, 160, seed=2)
            for found, wanted in zip(both_ways(compiled, x, gradient), both_ways(ours, x, gradient), strict=True):
                assert torch.equal(found, wanted)

    def test_gradients_are_equal_under_checkpointing(self) -> None:
        ours, x, gradient = rounded(plain()), rows(6, 96), rows(6, 160, seed=2)
        again = x.clone().requires_grad_()
        checkpoint(ours, again, use_reentrant=False).backward(gradient)
        assert again.grad is not None
        assert torch.equal(again.grad, both_ways(ours, x, gradient)[1])


def _back(pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0].float() * pair[1]


class TestWhoReadsTheWeight:
    def test_weight_has_the_values_it_multiplies_with(self) -> None:
        layer = plain()
        ours = rounded(layer)
        assert ours.weight.dtype == torch.bfloat16
        assert distance(ours.weight, layer.weight) < 0.03
        assert distance(ours.weight, ours.fp8_values.float() * ours.fp8_scales.t()) < 4e-3
        assert [name for name, _ in ours.named_parameters()] == ["bias"]
        assert "weight" not in ours.state_dict()

    def test_casting_the_model_keeps_the_values(self) -> None:
        model = nn.Sequential(rounded(plain()))
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.float()
        model.half()
        for name, buffer in model.named_buffers():
            assert buffer.dtype == before[name].dtype
            assert torch.equal(buffer.float(), before[name].float())
        assert model[0].bias.dtype == torch.float16

    def test_parking_preserves_it(self) -> None:
        ours, x, gradient = rounded(plain()), rows(6, 96), rows(6, 160, seed=2)
        before = both_ways(ours, x, gradient)
        parking = CopyParking(nn.Sequential(ours), torch.device("cpu"), InlineLane())
        parking.finish()
        parking.park()
        parking.finish()
        assert all(torch.equal(*pair) for pair in zip(both_ways(ours, x, gradient), before, strict=True))

    def test_merge_is_rejected(self) -> None:
        model = nn.Sequential(plain())
        attached = attach(model, Adapter(kind="lora"), family="wan", default_targets=("0",), seed=0)
        state = attached.state()
        with pytest.raises(ConfigError, match=r"0\.weight"):
            merge_module(state, nn.Sequential(rounded(plain())))


KINDS = ("lora", "dora", "locon", "lokr", "loha", "ia3", "diag_oft", "full_delta")


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_adapter_works_as_on_a_dequantized_layer(kind: str, path: str) -> None:
    """Compared with the adapter on a plain layer with `plain_weight()`. Only the quantized input differs."""
    ours = nn.Sequential(rounded(plain()))
    same = plain()
    same.weight.copy_(ours[0].weight)
    theirs = nn.Sequential(same)
    x, target = rows(32, 96), rows(32, 160, seed=5)
    found = []
    for model in (ours, theirs):
        attached = attach(
            model, Adapter.model_validate({"kind": kind, "rank": 4}), family="wan", default_targets=("0",), seed=0,
            adapter_path=path,  # type: ignore[arg-type]
        )  # fmt: skip
        generator = torch.Generator().manual_seed(3)
        for _, parameter in sorted(attached.parameters().items()):
            parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        with torch.autocast("cpu", torch.bfloat16):
            answer = model(x)
        F.mse_loss(answer.float(), target.float()).backward()
        gradients = [one.grad for _, one in sorted(attached.parameters().items())]
        assert all(one is not None for one in gradients)
        found.append((answer.detach(), torch.cat([one.flatten() for one in gradients if one is not None])))
        with attached.disabled():
            assert torch.equal(model(x), (Fp8Linear.forward(_base(model), x) if model is ours else same(x)))
    assert distance(found[0][0], found[1][0]) < 0.06
    assert distance(found[0][1], found[1][1]) < 0.06


def _base(model: nn.Sequential) -> Fp8Linear:
    return next(one for one in model.modules() if isinstance(one, Fp8Linear))
