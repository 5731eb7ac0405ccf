#!/usr/bin/env python3
"""ai-toolkit's EMA: the average of one path of values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aitoolkit_trainer  # noqa: F401 (stands in for what is missing)
import torch
from common import record

STEPS = 2000
SHOWN = [1, 2, 5, 10, 50, 100, 500, 1000, 2000]


def average(decay: float) -> dict[str, Any]:
    from toolkit.config_modules import EMAConfig
    from toolkit.ema import ExponentialMovingAverage

    config = EMAConfig(use_ema=True, ema_decay=decay)
    parameter = torch.nn.Parameter(torch.zeros(1))
    ema = ExponentialMovingAverage([parameter], decay=config.ema_decay, use_feedback=config.use_feedback,
                                   param_multiplier=config.param_multiplier)  # fmt: skip
    found = []
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            parameter.fill_(step / STEPS)
        ema.update()
        if step in SHOWN:
            found.append(float(ema.shadow_params[0]))
    return {"ema_config": {"use_ema": True, "ema_decay": decay}, "steps": SHOWN, "averages": found}


def values(_peer: Path) -> Any:
    return [average(decay) for decay in (0.9999, 0.999, 0.99)]


if __name__ == "__main__":
    record("ema", values)
