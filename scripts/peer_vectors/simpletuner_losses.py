#!/usr/bin/env python3
"""SimpleTuner's loss by noise level: one sample's error at each of several timesteps, for each kind of loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from common import record
from simpletuner_models import model_of

TIMESTEPS = [1, 20, 100, 250, 500, 750, 900, 980, 998]
KINDS = ("l2", "huber", "smooth_l1")
SCHEDULES = ("constant", "snr", "exponential")


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Prediction and target, [1, 4, 8, 8]: errors from 0 to about 3."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(1, 4, 8, 8, generator=generator), torch.randn(1, 4, 8, 8, generator=generator)


def losses(family: str, options: dict[str, Any]) -> dict[str, Any]:
    model = model_of(family, options)
    prediction, target = pair()
    model.get_prediction_target = lambda batch: target
    found = []
    for step in TIMESTEPS:
        timesteps = torch.tensor([step if family == "sdxl" else float(step)])
        found.append(float(model.loss({"timesteps": timesteps}, {"model_prediction": prediction})))
    return {"family": family, "options": options, "timesteps": TIMESTEPS, "losses": found}


def values(_peer: Path) -> Any:
    cases: list[dict[str, Any]] = []
    for family in ("flux", "sdxl"):
        cases.append(losses(family, {"loss_type": "l2"}))
        for kind in KINDS[1:]:
            for schedule in SCHEDULES:
                for delta in (0.1, 0.5):
                    options = {"loss_type": kind, "huber_schedule": schedule, "huber_c": delta}
                    cases.append(losses(family, options))
            cases.append(losses(family, {"loss_type": kind}))
    cases += [losses("sdxl", {"loss_type": kind, "snr_gamma": gamma}) for kind in KINDS for gamma in (1.0, 5.0)]
    return cases


if __name__ == "__main__":
    record("losses", values)
