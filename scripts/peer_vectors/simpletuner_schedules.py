#!/usr/bin/env python3
"""SimpleTuner's learning rates over a run, for each `lr_scheduler`."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import simpletuner_models  # noqa: F401 (stands in for what is missing)
import torch
from common import record

RATE, TOTAL = 1e-4, 60
NAMES = ("constant", "constant_with_warmup", "linear", "polynomial", "cosine", "sine", "cosine_with_restarts")


def rates(options: dict[str, Any]) -> dict[str, Any]:
    from simpletuner.helpers.configuration.cli_utils import normalize_lr_scheduler_value
    from simpletuner.helpers.training.custom_schedule import get_lr_scheduler

    settings = {"lr_warmup_steps": 0, "lr_end": 4e-7, "lr_power": 0.8, "lr_num_cycles": 1, **options}
    settings["lr_scheduler"] = normalize_lr_scheduler_value(settings["lr_scheduler"], settings["lr_warmup_steps"])
    args = SimpleNamespace(max_train_steps=TOTAL, **settings)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    one_process = SimpleNamespace(num_processes=1)
    scheduler = get_lr_scheduler(args, optimizer, one_process, logging.getLogger("quiet"), global_step=0)
    found = []
    for _ in range(TOTAL):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        # What the trainer gives this one, which it then reports as an error: the rate stays.
        if options["lr_scheduler"] == "cosine_with_restarts":
            try:
                scheduler.step(step=0, epoch=1)
            except TypeError:
                continue
        else:
            scheduler.step()
    return {"options": {"learning_rate": RATE, "max_train_steps": TOTAL, **options}, "rates": found}


def values(_peer: Path) -> Any:
    logging.getLogger("quiet").setLevel(logging.CRITICAL)
    cases = [{"lr_scheduler": name, "lr_warmup_steps": 12} for name in NAMES]
    cases += [{"lr_scheduler": name} for name in ("constant", "constant_with_warmup", "linear", "polynomial", "cosine")]
    cases += [
        {"lr_scheduler": name, "lr_warmup_steps": 12, "lr_end": 2e-5} for name in ("polynomial", "cosine", "sine")
    ]
    cases += [{"lr_scheduler": "polynomial", "lr_warmup_steps": 12, "lr_power": 2.0}]
    cases += [{"lr_scheduler": "linear", "lr_warmup_steps": 12, "lr_end": 2e-5}]
    return [rates(case) for case in cases]


if __name__ == "__main__":
    record("schedules", values)
