"""The factorised layers inside a model: chosen, kept small, compiled, and exchangeable with the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from gracetune.adapters.attach import attach
from gracetune.adapters.fast.modules import AdaptedLinear
from gracetune.adapters.lycoris import Factors
from gracetune.config.run_config import Adapter
from unit.adapters.fast.nets import CASES, WIDTH, Block, adapt, net, passes, relative

BF16 = torch.bfloat16


class TestChoice:
    @pytest.mark.parametrize(
        ("options", "path", "why"),
        [
            ({"kind": "lora"}, "factorised", "two products of the rank's width"),
            ({"kind": "dora"}, "factorised", "rows scaled after them"),
            ({"kind": "lokr", "factor": 8, "full_rank": True}, "factorised", "a product with W1 and one with W2"),
            ({"kind": "lokr", "factor": 8, "rank": 2}, "factorised", "products with W2's factors and with W1"),
            ({"kind": "loha", "rank": 4}, "factorised", "two products of width 16"),
            ({"kind": "loha", "rank": 64}, "rebuilt", "width 4096 would cost more than the change itself"),
            ({"kind": "ia3"}, "reference", "ia3 has no factorised form"),
            ({"kind": "dora", "dropout": 0.1}, "reference", "DoRA's dropout lets the base layer run twice"),
        ],
    )
    def test_is_reported_with_its_reason(self, options: dict[str, Any], path: str, why: str) -> None:
        (line,) = adapt(net(), options).decisions
        assert line.startswith(f"adapter path: {path} (")
        assert why in line
        assert line.endswith("; 4 layers)")

    def test_layers_of_one_model_may_differ(self) -> None:
        model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Flatten(), nn.Linear(24, 8))
        attached = attach(model, Adapter(targets=("Conv1d", "Linear")), family="wan", default_targets=(), seed=0)
        assert attached.decisions == (
            "adapter path: reference (convolutions; 1 layer)",
            "adapter path: factorised (two products of the rank's width; 1 layer)",
        )
        assert isinstance(model[0], LoraLayer)
        assert isinstance(model[2], AdaptedLinear)

    @pytest.mark.parametrize("case", CASES)
    def test_the_reference_can_be_asked_for(self, case: str) -> None:
        model = net()
        assert adapt(model, CASES[case], "reference").decisions == ("adapter path: reference (requested; 4 layers)",)
        assert not any(isinstance(module, AdaptedLinear) for module in model.modules())
        assert any(isinstance(module, LoraLayer | Factors) for module in model.modules())


@pytest.mark.parametrize("case", CASES)
class TestExchange:
    def test_names_and_first_values_are_the_references(self, case: str) -> None:
        adapter = Adapter(**{"targets": ("Linear",), **CASES[case]})
        ours, theirs = (
            attach(net(), adapter, family="wan", default_targets=(), seed=5, adapter_path=path).parameters()
            for path in ("auto", "reference")  # type: ignore[assignment]
        )
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], parameter) for name, parameter in theirs.items())

    def test_what_one_has_trained_the_other_continues(self, case: str) -> None:
        model, other = net(), net()
        trained, goes_on = adapt(model, CASES[case]), adapt(other, CASES[case], "reference")
        with torch.no_grad():
            for parameter in trained.parameters().values():
                parameter.mul_(1.1)
        goes_on.load(trained.state())
        x = torch.randn(3, WIDTH)
        torch.testing.assert_close(model(x), other(x), rtol=1e-5, atol=1e-5)


@contextmanager
def kept(model: nn.Module, x: Tensor) -> Iterator[dict[int, int]]:
    """The bytes autograd keeps, by storage, without parameters, buffers and the input."""
    known = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers(), x]}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


class TestKept:
    """One bf16 layer of 256 x 512 on 1,024 tokens: nothing of the weight's size, and little of the tokens'."""

    TOKENS, INPUTS, OUTPUTS = 1024, 256, 512
    CASES: tuple[tuple[dict[str, Any], int], ...] = (
        ({"kind": "lora", "rank": 4}, 4),
        ({"kind": "locon", "rank": 4}, 4),
        ({"kind": "dora", "rank": 4}, 4 + 512),
        ({"kind": "lokr", "factor": 16, "full_rank": True}, 0),
        ({"kind": "lokr", "factor": 8, "rank": 2}, 2 * (8 + 8)),
        ({"kind": "loha", "rank": 4}, 16),
        ({"kind": "loha", "rank": 40}, 0),
    )

    @pytest.mark.parametrize("autocast", [False, True])
    @pytest.mark.parametrize(("options", "per_token"), CASES)
    def test_is_the_input_and_the_ranks_width(self, options: dict[str, Any], per_token: int, autocast: bool) -> None:
        model = nn.Sequential(nn.Linear(self.INPUTS, self.OUTPUTS)).to(BF16).requires_grad_(False)
        attached = adapt(model, options)
        x = torch.randn(self.TOKENS, self.INPUTS, dtype=BF16, requires_grad=True)
        with kept(model, x) as found, torch.autocast("cpu", BF16, enabled=autocast):
            model(x)
        # Besides, casts of the factors themselves and DoRA's two numbers for each row.
        factors = 2 * sum(parameter.numel() for parameter in attached.parameters().values()) + 8 * self.OUTPUTS
        assert sum(found.values()) <= 2 * per_token * self.TOKENS + factors
        assert max(found.values(), default=0) < 2 * self.INPUTS * self.OUTPUTS or options["kind"] == "dora"

    @pytest.mark.parametrize("options", [{"kind": "lora", "rank": 4}, {"kind": "lokr", "factor": 16}])
    def test_an_fp32_input_under_autocast_is_cast_once(self, options: dict[str, Any]) -> None:
        model = nn.Sequential(nn.Linear(self.INPUTS, self.OUTPUTS)).requires_grad_(False)
        adapt(model, options)
        x = torch.randn(self.TOKENS, self.INPUTS, requires_grad=True)
        with kept(model, x) as found, torch.autocast("cpu", BF16):
            model(x)
        assert sum(size == 2 * x.numel() for size in found.values()) == 1


def everyday(*cases: str) -> list[Any]:
    """Compiling takes seconds: the others are left to `make test-full`."""
    return [pytest.param(case, marks=[] if case in cases else [pytest.mark.full]) for case in CASES]


class TestCompiled:
    @pytest.fixture(autouse=True)
    def fresh(self) -> Iterator[None]:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("case", everyday("dora", "lokr", "loha rebuilt"))
    def test_both_passes_are_one_graph_each_and_the_same(self, case: str) -> None:
        model = net(BF16, blocks=1)
        parameters = adapt(model, CASES[case]).parameters()
        plain = passes(model, parameters, autocast=True)
        model[0].compile(backend="aot_eager", fullgraph=True)
        compiled = passes(model, parameters, autocast=True)
        assert relative(compiled.output, plain.output) <= 1e-3
        for name, gradient in plain.gradients.items():
            assert relative(compiled.gradients[name], gradient) <= 5e-3, name

    @pytest.mark.parametrize("case", everyday("lokr"))
    def test_one_graph_for_all_blocks_and_three_for_all_strengths(self, case: str) -> None:
        model = net(BF16, blocks=3)
        attached = adapt(model, CASES[case])
        counter = CompileCounter()
        for block in model:
            block.compile(backend=counter, fullgraph=True, dynamic=False)

        def run() -> None:
            passes(model, {}, autocast=True)

        run()
        assert counter.frame_count == 1
        for strength in (0.5, 0.25, 2.0, 0.0, 0.3, 1.0):
            with attached.with_strength(strength):
                run()
        run()
        assert counter.frame_count == 3


class Held8(nn.Linear):
    """A weight in fp8 with a scale for each row, as a quantized base has it."""

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = plain.in_features, plain.out_features, plain.bias
        scales = plain.weight.detach().float().abs().amax(1, keepdim=True) / 448
        self.register_buffer("scales", scales)
        self.weight = nn.Parameter((plain.weight.detach() / scales).to(torch.float8_e4m3fn), requires_grad=False)

    def plain_weight(self) -> Tensor:
        return (self.weight.float() * self.scales).to(BF16)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.plain_weight().to(x.dtype), self.bias)


@pytest.mark.parametrize("case", CASES)
def test_the_base_layer_may_hold_its_weight_in_another_form(case: str) -> None:
    held, plain = Block().to(BF16).requires_grad_(False), Block().to(BF16).requires_grad_(False)
    plain.load_state_dict(held.state_dict())
    for name in ("wide", "narrow"):
        layer = Held8(getattr(held, name))
        setattr(held, name, layer)
        getattr(plain, name).weight.data.copy_(layer.plain_weight())
    outputs = []
    for model in (nn.Sequential(held), nn.Sequential(plain)):
        attached = adapt(model, CASES[case])
        outputs.append(passes(model, attached.parameters(), autocast=True))
    assert torch.equal(outputs[0].output, outputs[1].output)
    for name, gradient in outputs[1].gradients.items():
        assert torch.equal(outputs[0].gradients[name], gradient)


def test_model_code_may_look_at_the_layer_it_had() -> None:
    model = net(BF16, blocks=1)
    linear = model[0].wide
    adapt(model, CASES["lora"])
    adapted = model[0].wide
    assert adapted.weight is linear.weight
    assert adapted.bias is linear.bias
    assert (adapted.in_features, adapted.out_features) == (linear.in_features, linear.out_features)
