"""The base layer's product computed together with the adapter's: the path of a GPU, run on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gracetune.adapters.computation import Computation
from gracetune.adapters.fast import products
from gracetune.adapters.fast.modules import AdaptedLinear, LohaLinear, LokrLinear, LoraLinear
from gracetune.models.common.attention import apply_layers

WIDTH, ROWS, RANK = 48, 40, 4
MODE = Computation("low rank", "")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "use_half_kernels", lambda x: x.dtype == torch.bfloat16)


def base(seed: int, outputs: int = WIDTH) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(WIDTH, outputs).requires_grad_(False).to(torch.bfloat16)


def lora(seed: int, outputs: int = WIDTH, rank: int = RANK, **options: float) -> LoraLinear:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "lora_A.weight": torch.randn(rank, WIDTH, generator=generator),
        "lora_B.weight": torch.randn(outputs, rank, generator=generator),
    }
    return LoraLinear(base(seed, outputs), tensors, MODE, **{"scale": 0.5, "dropout": 0.0, **options})


def noise(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(layers: Sequence[AdaptedLinear], x: Tensor, ask: Callable[[Tensor], Sequence[Tensor]]) -> list[Tensor]:
    """The outputs, and the gradients of the input and of all factors."""
    x = x.clone().requires_grad_()
    trained = [parameter for layer in layers for parameter in layer.parameters() if parameter.requires_grad]
    found = ask(x)
    total = sum((one.float() * noise(*one.shape, seed=place)).sum() for place, one in enumerate(found))
    assert isinstance(total, Tensor)
    return [*(one.detach() for one in found), *torch.autograd.grad(total, [x, *trained])]


def exactly(layers: Sequence[AdaptedLinear], x: Tensor) -> list[Tensor]:
    """The same in fp32, by the path of a CPU."""
    wide = [
        type(one)(one.base_layer.float(), _tensors(one), one.computation, scale=one.scale, dropout=0.0)
        for one in layers
    ]
    found = run(wide, x.float(), lambda given: [one(given) for one in wide])
    for one in layers:
        one.base_layer.to(torch.bfloat16)
    return found


def _tensors(layer: AdaptedLinear) -> dict[str, Tensor]:
    names = {"lora_A_weight": "lora_A.weight", "lora_B_weight": "lora_B.weight"}
    return {names.get(name, name): one.data for name, one in layer.named_parameters(recurse=False)}


def error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    return [float((one.float() - two).norm() / two.norm()) for one, two in zip(found, wanted, strict=True)]


def test_one_layer(as_on_a_gpu: None) -> None:
    layer, x = lora(0), noise(2, ROWS, WIDTH).bfloat16()
    found = run([layer], x, lambda given: [layer(given)])
    assert max(error(found, exactly([layer], x))) < 8e-3
    assert found[0].shape == (2, ROWS, WIDTH)
    assert found[2].dtype == torch.float32


def test_three_layers_with_one_input_are_what_they_are_alone(as_on_a_gpu: None) -> None:
    layers, x = [lora(0), lora(1, 32), lora(2, 64, rank=3)], noise(2, ROWS, WIDTH).bfloat16()
    together = run(layers, x, lambda given: apply_layers(given, layers))
    alone = run(layers, x, lambda given: [one(given) for one in layers])
    wanted = exactly(layers, x)
    assert [one.shape for one in together] == [one.shape for one in alone]
    assert max(error(together, wanted)) < 8e-3
    assert max(error(together, [one.float() for one in alone])) < 8e-3


def test_gradients_of_the_factors_are_not_rounded(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = lora(0), noise(4000, WIDTH).bfloat16()
    fast = error(run([layer], x, lambda given: [layer(given)]), exactly([layer], x))
    monkeypatch.setattr(products, "use_half_kernels", lambda x: False)
    plain = error(run([layer], x, lambda given: [layer(given)]), exactly([layer], x))
    assert fast[2] < 0.9 * plain[2]
    assert fast[3] < 0.9 * plain[3]


@pytest.mark.parametrize("mode", ["one is off", "one has a strength", "one drops", "one is of another kind"])
def test_layers_that_differ_answer_one_by_one(as_on_a_gpu: None, mode: str) -> None:
    layers: list[AdaptedLinear] = [lora(0), lora(1), lora(2)]
    if mode == "one drops":
        layers[1].dropout = 0.5
    elif mode == "one is of another kind":
        layers[1] = LohaLinear(base(1), {}, Computation("hadamard rebuilt", ""), scale=1.0, dropout=0.0)
        layers[1].set_strength(0)
    else:
        layers[1].set_strength(0.0 if mode == "one is off" else 0.5)
    x = noise(ROWS, WIDTH).bfloat16()
    with torch.no_grad():
        torch.manual_seed(0)
        together = apply_layers(x, layers)
        torch.manual_seed(0)
        alone = [one(x) for one in layers]
    assert all(torch.equal(one, two) for one, two in zip(together, alone, strict=True))


def test_plain_layers_answer_one_by_one() -> None:
    layers, x = [base(0), base(1)], noise(ROWS, WIDTH).bfloat16()
    assert all(torch.equal(one, layer(x)) for one, layer in zip(apply_layers(x, layers), layers, strict=True))


def test_what_needs_no_gradient_gets_none(as_on_a_gpu: None) -> None:
    """The input of the captions or of the first block needs no gradient. This saves a product of the weight's size."""
    layer = lora(0)

    def counted(x: Tensor) -> int:
        answer = layer(x).float().sum()
        with FlopCounterMode(display=False) as counter:
            answer.backward()
        return int(counter.get_total_flops())

    x = noise(ROWS, WIDTH).bfloat16()
    more = counted(x.clone().requires_grad_()) - counted(x)
    assert more == 2 * ROWS * WIDTH * (WIDTH + RANK)


def test_a_compiler_knows_what_the_products_cost(as_on_a_gpu: None) -> None:
    """Otherwise it would assume that recomputing them is free."""
    layer, x = lora(0), noise(ROWS, WIDTH).bfloat16()
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        layer(x)
    assert counted.get_total_flops() == 2 * ROWS * WIDTH * (WIDTH + 2 * RANK)


def mixed_on_the_cpu(small: Tensor, rows: Tensor, bias: Tensor | None, c: Tensor, d: Tensor) -> Tensor:
    mixed = torch.matmul(small.float(), rows.float()).reshape(c.shape[0], -1)
    return ((mixed if bias is None else mixed + bias.float()).to(c.dtype).float() + c.float() @ d.float()).to(c.dtype)


@pytest.mark.parametrize("outputs", [48, 96])
def test_a_kronecker_product(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, outputs: int) -> None:
    """This tests all of it except the kernel, which needs a GPU."""
    monkeypatch.setattr(products, "mixed_and_product", mixed_on_the_cpu)
    factors = {"lokr_w1": noise(4, 4, seed=1), "lokr_w2": noise(outputs // 4, WIDTH // 4, seed=2)}
    layer = LokrLinear(base(0, outputs), factors, Computation("kronecker", ""), scale=0.5, dropout=0.0)
    x = noise(2, ROWS, WIDTH).bfloat16()
    found = run([layer], x, lambda given: [layer(given)])
    assert max(error(found, exactly([layer], x))) < 8e-3
    assert found[2].dtype == torch.float32
