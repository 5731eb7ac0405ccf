#!/usr/bin/env python3
"""ai-toolkit's optimizers, with its own defaults, over 500 steps of the small problem (`problem.py`)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import aitoolkit_trainer  # noqa: F401 (stands in for what is missing)
import torch
from common import record
from problem import SHOWN, STEPS, follow, gradients, start

CASES: list[dict[str, Any]] = [
    {"optimizer": "adamw", "lr": 1e-3},
    {"optimizer": "adamw", "lr": 1e-3, "optimizer_params": {"weight_decay": 1e-4, "betas": [0.8, 0.95]}},
    {"optimizer": "adam", "lr": 1e-3},
    {"optimizer": "adafactor", "lr": 1e-3},
    {"optimizer": "adafactor", "lr": 1e-3, "optimizer_params": {"scale_parameter": True, "weight_decay": 0.1}},
    {"optimizer": "lion", "lr": 1e-3},
    {"optimizer": "automagic", "lr": 1e-6},
    {"optimizer": "automagic", "lr": 1e-5, "optimizer_params": {"lr_bump": 5e-6, "max_lr": 1e-3, "weight_decay": 0.01}},
]
RATES_SHOWN = [100, 300, 500, 1000, 2000]


def path(train: dict[str, Any]) -> dict[str, Any]:
    from toolkit.optimizer import get_optimizer

    torch.manual_seed(0)
    parameters = start()
    options = copy.deepcopy(train.get("optimizer_params", {}))
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    optimizer = get_optimizer(parameters, train["optimizer"], learning_rate=train["lr"], optimizer_params=options)
    return {"train": train, "steps": SHOWN, **follow(parameters, optimizer.step)}


def rates() -> dict[str, Any]:
    """Mean learning rate of Automagic over 2,000 steps of a 64 x 32 matrix whose gradients mostly keep their sign."""
    from toolkit.optimizers.automagic import Automagic

    draw = torch.Generator().manual_seed(21)
    weight = torch.nn.Parameter(torch.zeros(64, 32))
    steady = torch.randn(64, 32, generator=draw)
    optimizer = Automagic([weight], lr=1e-6)
    found = []
    for step in range(1, max(RATES_SHOWN) + 1):
        weight.grad = 0.01 * (0.5 * steady + torch.randn(64, 32, generator=draw))
        optimizer.step()
        if step in RATES_SHOWN:
            found.append(float(optimizer.get_avg_learning_rate()))
    return {"train": {"optimizer": "automagic", "lr": 1e-6}, "rate_steps": RATES_SHOWN, "mean_rates": found}


def values(_peer: Path) -> Any:
    assert len(gradients(STEPS)) == 2
    return [*(path(case) for case in CASES), rates()]


if __name__ == "__main__":
    record("optimizers", values)
