"""Small networks with an adapter, factorised or by reference, and the distance between two sets of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gracetune.adapters.attach import Attached, attach
from gracetune.adapters.computation import AdapterPath
from gracetune.config.run_config import Adapter
from unit.adapters.denoisers import shake

WIDTH = 128
CASES: dict[str, dict[str, Any]] = {
    "lora": {"kind": "lora", "rank": 8, "alpha": 4},
    "dora": {"kind": "dora", "rank": 8},
    "locon": {"kind": "locon", "rank": 8},
    "lokr": {"kind": "lokr", "factor": 8, "full_rank": True},
    "lokr by rank": {"kind": "lokr", "factor": 8, "rank": 2},
    "lokr of products": {"kind": "lokr", "factor": -1, "rank": 2, "decompose_both": True},
    "loha": {"kind": "loha", "rank": 4},
    "loha rebuilt": {"kind": "loha", "rank": 16},
}
"""Every form of computation (`adapters.computation`)."""


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.narrow(F.gelu(self.wide(self.norm(x))))
        return result


def net(dtype: torch.dtype = torch.float32, blocks: int = 2) -> nn.Sequential:
    """A network whose weights bf16 represents exactly, in any precision."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        return nn.Sequential(*(Block() for _ in range(blocks))).to(torch.bfloat16).to(dtype).requires_grad_(False)


def adapt(model: nn.Module, options: Mapping[str, Any], path: AdapterPath = "auto", **more: Any) -> Attached:
    adapter = Adapter(**{"targets": ("Linear",), **options, **more})
    attached = attach(model, adapter, family="wan", default_targets=(), seed=0, adapter_path=path)
    shake(attached, 0.02)
    return attached


@dataclass(frozen=True)
class Passes:
    output: Tensor
    gradients: dict[str, Tensor]
    """By parameter name; `x` is the input's gradient."""


def passes(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], *, autocast: bool = False, seed: int = 0
) -> Passes:
    """One forward and one backward pass, on an input that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    x = torch.randn(2, 48, WIDTH, generator=generator).bfloat16().to(dtype).requires_grad_()
    wanted = torch.randn(2, 48, WIDTH, generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(x)
    (output.float() - wanted).square().mean().backward()
    gradients = {name: cast(Tensor, parameter.grad).clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    assert x.grad is not None
    return Passes(output.detach().float(), {**gradients, "x": x.grad.float()})


def distance(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, without: str = "x") -> float:
    """The relative distance of all gradients together."""
    names = [name for name in wanted if name != without]
    apart = sum(float((found[name] - wanted[name]).double().square().sum()) for name in names)
    return float((apart / sum(float(wanted[name].double().square().sum()) for name in names)) ** 0.5)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))
