from __future__ import annotations

import pytest
import torch

from gracetune.bench import optim as bench
from gracetune.hardware import probe
from gracetune.optim.automagic import Automagic
from gracetune.optim.automagic_stack import CudaStack

pytestmark = pytest.mark.gpu

SHAPES = [(16, 5120), (5120, 16), (16, 5120), (7, 130), (64,), (4, 3, 3, 5), (13824, 16), (513, 257)]


def trained(
    fused: bool, dtype: torch.dtype, steps: int = 20, decay: float = 0.0
) -> tuple[list[torch.Tensor], Automagic]:
    draw = torch.Generator("cuda").manual_seed(0)
    parameters = [torch.randn(shape, device="cuda", generator=draw).to(dtype).requires_grad_() for shape in SHAPES]
    named = [(str(at), parameter) for at, parameter in enumerate(parameters)]
    optimizer = Automagic(named, lr=1e-4, lr_bump=1e-4, max_lr=1e-2, weight_decay=decay, fused=None if fused else False)
    for step in range(steps):
        for at, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, device="cuda", generator=draw).to(dtype)
            parameter.grad = None if (step + at) % 7 == 0 else gradient
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_do_what_the_plain_arithmetic_does(dtype: torch.dtype, decay: float) -> None:
    ours, fused = trained(True, dtype, decay=decay)
    plain, eager = trained(False, dtype, decay=decay)
    assert sum(isinstance(stack, CudaStack) for _group, _rule, stack in fused._stacks) == 6
    assert not any(isinstance(stack, CudaStack) for _group, _rule, stack in eager._stacks)
    one, two = fused.named_state().tensors, eager.named_state().tensors
    for key in one:
        if one[key].is_floating_point():
            torch.testing.assert_close(one[key], two[key], rtol=1e-4, atol=1e-9)
        else:
            assert torch.equal(one[key], two[key]), key
    relative, absolute = (1e-4, 1e-5) if dtype == torch.float32 else (2e-2, 2e-2)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=relative, atol=absolute)


def test_two_runs_give_the_same_bits() -> None:
    one, two = trained(True, torch.float32)[0], trained(True, torch.float32)[0]
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_step_needs_no_memory_of_its_own() -> None:
    parameters, optimizer = trained(True, torch.float32, steps=2)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    elements = sum(parameter.numel() for parameter in parameters)
    assert torch.cuda.max_memory_allocated() - before < elements  # less than a byte for each


def test_costs_at_most_three_steps_of_fused_adamw() -> None:
    row = bench.run(probe())[0]
    assert row.ok, row
