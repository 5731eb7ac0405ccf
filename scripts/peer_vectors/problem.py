"""The small problem that optimizers are followed on: a matrix and a vector, gradients that are mostly noise.

The same for peers and for us: a seed gives everything, and gradients do not depend on the parameters (so that a
rounding difference stays one).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

STEPS = 500
SHOWN = [1, 2, 10, 50, 100, 250, 500]


def start() -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(11)
    sizes = ((6, 4), (5,))
    return [torch.nn.Parameter(0.05 * torch.randn(size, generator=draw)) for size in sizes]


def gradients(step: int) -> list[torch.Tensor]:
    """Of step 1, 2, …: a direction for each element that stays, and noise that is larger."""
    steady, draw = torch.Generator().manual_seed(12), torch.Generator().manual_seed(1000 + step)
    return [
        0.01 * (0.3 * torch.randn(size, generator=steady) + torch.randn(size, generator=draw))
        for size in ((6, 4), (5,))
    ]


def follow(parameters: list[torch.nn.Parameter], step: Callable[[], Any]) -> dict[str, list[list[float]]]:
    """Flat values of both parameters at the steps of `SHOWN`."""
    found: dict[str, list[list[float]]] = {"matrix": [], "vector": []}
    for number in range(1, STEPS + 1):
        for parameter, gradient in zip(parameters, gradients(number), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        step()
        if number in SHOWN:
            for name, parameter in zip(found, parameters, strict=True):
                found[name].append(parameter.detach().float().flatten().tolist())
    return found
