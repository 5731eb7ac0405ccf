"""fp8 layers on a GPU that has them: the CPU's numbers, and the compiler's one graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gracetune.models.eight_bit_linear import Fp8Linear, check_fp8
from gracetune.models.footprint import FP8_CAPABILITY
from gracetune.models.spec import Fp8Layouts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < FP8_CAPABILITY,
        reason="products with a scale for each row need Hopper or later",
    ),
]
LAYOUTS: tuple[Fp8Layouts, ...] = ("both", "one")


def both_ways(layer: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    answer = layer(x)
    answer.backward(gradient)
    assert x.grad is not None
    return answer.detach().cpu().double(), x.grad.cpu().double()


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 64, 32), (77, 512, 1536), (1024, 1536, 512)])
def test_the_gpu_computes_what_the_cpu_does(layouts: Fp8Layouts, tokens: int, inputs: int, outputs: int) -> None:
    device = torch.device("cuda", 0)
    check_fp8(device)
    torch._dynamo.reset()  # each shape its own graph: torch makes few for one function, and then stops
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs).bfloat16().requires_grad_(False)
    x, gradient = torch.randn(tokens, inputs).bfloat16(), torch.randn(tokens, outputs).bfloat16()
    wanted = both_ways(Fp8Linear(plain.weight, plain.bias, layouts), x, gradient)
    layer = Fp8Linear(plain.weight.to(device), nn.Parameter(plain.bias.to(device), requires_grad=False), layouts)
    for run in (layer, torch.compile(layer, fullgraph=True)):
        found = both_ways(run, x.to(device), gradient.to(device))
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours - theirs).norm() / theirs.norm() < 1e-2  # the matrix units' sums have fewer digits


def test_a_step_does_not_wait() -> None:
    device = torch.device("cuda", 0)
    layer = Fp8Linear(torch.randn(64, 64, device=device), None)
    x = torch.randn(16, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
