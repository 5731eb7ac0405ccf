#!/usr/bin/env python3
"""ai-toolkit's learning rates over a run for each `lr_scheduler`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import aitoolkit_trainer  # noqa: F401 (stands in for what is missing)
import torch
from common import record

RATE, TOTAL = 1e-4, 60
CASES: list[dict[str, Any]] = [
    {"lr_scheduler": "constant"},
    {"lr_scheduler": "cosine"},
    {"lr_scheduler": "cosine", "lr_scheduler_params": {"eta_min": 2e-5}},
    {"lr_scheduler": "cosine_with_restarts"},
    {"lr_scheduler": "cosine_with_restarts", "lr_scheduler_params": {"eta_min": 2e-5}},
    {"lr_scheduler": "linear", "lr_scheduler_params": {"start_factor": 1.0, "end_factor": 0.1}},
    {"lr_scheduler": "constant_with_warmup", "lr_scheduler_params": {"num_warmup_steps": 12}},
]


def rates(train: dict[str, Any]) -> dict[str, Any]:
    """As the trainer steps one: once with the first step's number, then after every optimizer step."""
    from toolkit.scheduler import get_lr_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    params = copy.deepcopy(train.get("lr_scheduler_params", {}))
    scheduler = get_lr_scheduler(train["lr_scheduler"], optimizer, **{**params, "total_iters": TOTAL})
    scheduler.step(0)
    found = []
    for _ in range(TOTAL):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return {"train": {"lr": RATE, "steps": TOTAL, **train}, "rates": found}


def values(_peer: Path) -> Any:
    return [rates(case) for case in CASES]


if __name__ == "__main__":
    record("schedules", values)
