"""Adapters as a compiled graph on a GPU computes them: every form, against fp32 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gracetune.adapters.attach import Attached
from gracetune.adapters.fast.modules import LoraLinear
from gracetune.models.common.attention import apply_layers
from unit.adapters.fast.nets import CASES, WIDTH, adapt, distance, net

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


class Three(nn.Module):
    """Layers with one input, as queries, keys and values have it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(2)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, width, bias=width != 64) for width in (WIDTH, 256, 64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(apply_layers(x, tuple(self.layers)), dim=-1)


def gradients(model: nn.Module, attached: Attached, x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    x = x.to(dtype).requires_grad_()
    parameters = attached.parameters()
    with torch.autocast(x.device.type, dtype, enabled=x.is_cuda):
        answer = model(x)
    wanted = torch.randn(answer.shape, generator=torch.Generator().manual_seed(3)).to(x.device)
    (answer.float() - wanted).square().mean().backward()
    assert x.grad is not None
    found = {"input": x.grad.float().cpu(), "output": answer.detach().float().cpu()}
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        found[name] = parameter.grad.cpu()
        parameter.grad = None
    return found


def inputs(batch: int, tokens: int) -> Tensor:
    return torch.randn(batch, tokens, WIDTH, generator=torch.Generator().manual_seed(tokens)).bfloat16().float()


def on_the_gpu(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Frozen weights in halves, factors in fp32, and what is known of the weights (DoRA's lengths) as it is."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(GPU, parameter.dtype if parameter.requires_grad else dtype)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(GPU)
    return model


@pytest.mark.parametrize("rank", [4, 80], ids=["thin", "wide"])
def test_layers_with_one_input(rank: int) -> None:
    torch._dynamo.reset()
    reference, model = Three().requires_grad_(False), Three().requires_grad_(False)
    options = {"kind": "lora", "rank": rank}
    exact, attached = adapt(reference, options), adapt(model, options)
    assert all(isinstance(layer, LoraLinear) for layer in model.layers)
    compiled: Any = torch.compile(on_the_gpu(model, torch.bfloat16), fullgraph=True)
    wanted = gradients(reference, exact, inputs(2, 48), torch.float32)
    found = gradients(compiled, attached, inputs(2, 48).to(GPU), torch.bfloat16)
    assert distance(found, wanted, without="") < 1.5e-2


# -- products from and to the rank ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("turned", [False, True], ids=["by rows", "by columns"])
@pytest.mark.parametrize(("rows", "width", "rank"), [(4096, 5120, 16), (512, 13824, 16), (77, 300, 5), (1, 5120, 1)])
def test_products_to_and_from_the_rank(rows: int, width: int, rank: int, turned: bool, compiled: bool) -> None:
    """Rounded once, whatever the factor's order in memory."""
    from gracetune.kernels.low_rank import thin, to_rank  # only a GPU has triton

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, device=GPU).bfloat16()

    def factor(first: int, second: int) -> Tensor:
        return made(second, first).t() if turned else made(first, second)

    torch._dynamo.reset()
    for product, left, right in (
        (to_rank, made(rows, width), factor(width, rank)), (thin, made(rows, rank), factor(rank, width))
    ):  # fmt: skip

        def requested(left: Tensor, right: Tensor, product: Any = product) -> Tensor:
            result: Tensor = product(left, right)
            return result

        found = (torch.compile(requested, fullgraph=True) if compiled else requested)(left, right)
        wanted = left.double().mm(right.double())
        assert found.dtype == torch.bfloat16
        assert float((found.double() - wanted).norm() / wanted.norm()) <= 4e-3


# -- every form: compiles for a quarter of a minute in each test ------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "dynamic"), [(torch.bfloat16, None), (torch.bfloat16, True), (torch.float16, None)],
    ids=["bf16, one shape", "bf16, any shape", "fp16"],
)  # fmt: skip
@pytest.mark.parametrize("case", CASES)
def test_every_form(case: str, dtype: torch.dtype, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    reference, model = net(), net()
    exact, attached = adapt(reference, CASES[case]), adapt(model, CASES[case])
    compiled: Any = torch.compile(on_the_gpu(model, dtype), fullgraph=True, dynamic=dynamic)
    for batch, tokens in ((2, 48), (3, 80)):
        wanted = gradients(reference, exact, inputs(batch, tokens), torch.float32)
        found = gradients(compiled, attached, inputs(batch, tokens).to(GPU), dtype)
        assert distance(found, wanted, without="input") < 1.5e-2
        assert distance({"input": found["input"]}, {"input": wanted["input"]}, without="") < 1.5e-2
