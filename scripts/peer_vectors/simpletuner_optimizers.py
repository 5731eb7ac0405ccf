#!/usr/bin/env python3
"""SimpleTuner's optimizers, with its own defaults, over 500 steps of the small problem (`problem.py`)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import simpletuner_models  # noqa: F401 (stands in for what is missing)
import torch
from common import record
from problem import SHOWN, follow, start

RATE = 1e-3
CASES: list[dict[str, Any]] = [
    {"optimizer": "adamw_bf16"},
    {"optimizer": "torch-adamw"},
    {"optimizer": "torch-adam"},
    {"optimizer": "torch-adafactor"},
    {"optimizer": "torch-adafactor", "optimizer_config": "weight_decay=0.1"},
    {"optimizer": "optimi-adamw"},
    {"optimizer": "optimi-adam"},
    {"optimizer": "optimi-lion"},
    {"optimizer": "bnb-adamw"},
    {"optimizer": "bnb-lion"},
    {"optimizer": "prodigy"},
    {"optimizer": "torch-adamw", "optimizer_beta1": 0.8, "optimizer_beta2": 0.95,
     "optimizer_config": "eps=1e-4,weight_decay=0.1"},
]  # fmt: skip


def path(options: dict[str, Any]) -> dict[str, Any]:
    """As the trainer makes one: the learning rate first, then what the optimizer's own settings say over it."""
    from simpletuner.helpers.training.optimizer_param import determine_optimizer_class_with_config

    torch.manual_seed(0)
    args = SimpleNamespace(
        learning_rate=RATE, optimizer_config=None, optimizer_beta1=None, optimizer_beta2=None, prodigy_steps=None,
        optimizer_release_gradients=False, lr_warmup_steps=0, use_fsdp=False, fsdp_enable=False,
    )  # fmt: skip
    vars(args).update(options)
    settings, kind = determine_optimizer_class_with_config(args, False, False, True)
    parameters = start()
    if options["optimizer"] == "adamw_bf16":  # it takes no others
        parameters = [torch.nn.Parameter(parameter.detach().bfloat16()) for parameter in parameters]
    optimizer = kind(parameters, **{"lr": RATE, **settings})
    shown = {name: str(value) for name, value in settings.items()}
    return {"options": {"learning_rate": RATE, **options}, "settings": shown, "steps": SHOWN,
            **follow(parameters, optimizer.step)}  # fmt: skip


def values(_peer: Path) -> Any:
    return [path(case) for case in CASES]


if __name__ == "__main__":
    record("optimizers", values)
