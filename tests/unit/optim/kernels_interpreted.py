"""Compare our CUDA kernels with the plain arithmetic on a CPU.

Run with TRITON_INTERPRET=1; prints how many cases agree.
"""

from __future__ import annotations

import torch

from gracetune.optim.automagic_stack import CudaStack, Stack, UpdateRule
from gracetune.optim.element_rates import RateGrid, RateLimits

# No bf16: the interpreter truncates where a GPU rounds.
CASES = (
    ((16, 50), torch.float32, 0.0, RateLimits()),
    ((300, 16), torch.float32, 0.1, RateLimits(1e-5, 1e-7, 2e-4)),
    ((4, 3, 3, 5), torch.float32, 0.0, RateLimits()),
    ((7, 130), torch.float16, 0.0, RateLimits(1e-3, 1e-4, 1e-1)),
    ((1, 9), torch.float32, 0.0, RateLimits(1e-9, 1e-10, 1e-3)),
)


def agree(shape: tuple[int, ...], dtype: torch.dtype, decay: float, limits: RateLimits) -> None:
    draw = torch.Generator().manual_seed(0)
    rule = UpdateRule(RateGrid.of(limits), 0.999, 1e-30, 1.0, decay)
    ours = [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for _ in range(3)]
    plain = [parameter.detach().clone().requires_grad_() for parameter in ours]
    stacks = [
        kind.of(parameters, ["a", "b", "c"], 1e-5, rule) for kind, parameters in ((CudaStack, ours), (Stack, plain))
    ]
    for step in range(5):
        active = [0, 2] if step == 2 else [0, 1, 2]
        for at in range(3):
            gradient = torch.randn(shape, generator=draw).to(dtype) if at in active else None
            ours[at].grad, plain[at].grad = gradient, gradient
        for stack in stacks:
            # The flag skips the step before the last, as for non-finite gradients.
            stack.step(active, rule, torch.tensor(float(step == 3)) if step else None)
    for one, two in zip(stacks[0].entries().values(), stacks[1].entries().values(), strict=True):
        if one.is_floating_point():
            torch.testing.assert_close(one, two)
        else:
            assert torch.equal(one, two)
    for one, two in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, two)


if __name__ == "__main__":
    for case in CASES:
        agree(*case)
    print(f"{len(CASES)} cases agree")
