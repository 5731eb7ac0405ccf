#!/usr/bin/env python3
"""SimpleTuner's EMA: its decay at every optimizer step, and the average of one path of values."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import simpletuner_models  # noqa: F401 (stands in for what is missing)
import torch
from common import record

STEPS = 2000
SHOWN = [1, 2, 3, 4, 5, 10, 20, 50, 100, 200, 500, 1000, 1500, 2000]


def average(options: dict[str, Any]) -> dict[str, Any]:
    from simpletuner.helpers.training.ema import EMAModel

    args = SimpleNamespace(ema_update_interval=options.get("ema_update_interval"), ema_device="accelerator",
                           ema_cpu_only=False)  # fmt: skip
    parameter = torch.nn.Parameter(torch.zeros(1))
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    ema = EMAModel(args, accelerator, [parameter], decay=options["ema_decay"],
                   warmup_steps=options.get("ema_warmup_steps", 0))  # fmt: skip
    decays, averages = [], []
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            parameter.fill_(step / STEPS)
        ema.step([parameter], global_step=step)
        if step in SHOWN:
            decays.append(ema.get_decay())
            averages.append(float(ema.shadow_params[0]))
    return {"options": options, "steps": SHOWN, "decays": decays, "averages": averages}


def values(_peer: Path) -> Any:
    return [average({"ema_decay": decay, **more})
            for decay in (0.9999, 0.995)
            for more in ({}, {"ema_update_interval": 10}, {"ema_warmup_steps": 100},
                         {"ema_update_interval": 10, "ema_warmup_steps": 100})]  # fmt: skip


if __name__ == "__main__":
    record("ema", values)
