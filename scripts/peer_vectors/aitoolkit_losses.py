#!/usr/bin/env python3
"""ai-toolkit's loss by noise level: one sample's error at several timesteps, for each kind of loss and weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from aitoolkit_trainer import BatchOf, trainer_for
from common import record

STEPS = [1000, 999, 990, 980, 950, 900, 800, 700, 600, 501, 500, 499, 400, 300, 200, 100, 50, 20, 10, 2, 1]


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Prediction and noise, [1, 4, 8, 8]; latents are 0, so the target is the noise in every objective."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(1, 4, 8, 8, generator=generator), torch.randn(1, 4, 8, 8, generator=generator)


def losses(arch: str, train: dict[str, Any]) -> dict[str, Any]:
    trainer = trainer_for(arch, train)
    prediction, noise = pair()
    batch = BatchOf(torch.zeros_like(noise))
    trainer.process_general_training_batch(BatchOf(torch.zeros_like(noise)))  # sets the scheduler's timesteps
    steps = STEPS if arch != "sdxl" else [step - 1 for step in STEPS]
    found = [
        float(trainer.calculate_loss(prediction, noise, noise, torch.tensor([float(step)]), batch)) for step in steps
    ]
    return {"arch": arch, "train": train, "timesteps": steps, "losses": found}


def values(_peer: Path) -> Any:
    cases = [losses("qwen_image", {"timestep_type": kind}) for kind in ("linear", "weighted")]
    cases += [losses("qwen_image", {"timestep_type": "linear", name: True})
              for name in ("linear_timesteps", "linear_timesteps2")]  # fmt: skip
    cases.append(losses("flux_kontext", {"timestep_type": "weighted"}))
    cases += [losses("flux", {"timestep_type": "linear", "loss_type": kind}) for kind in ("mae", "pseudo_huber")]
    cases += [losses("sdxl", {"noise_scheduler": "ddpm", **more})
              for more in ({}, {"min_snr_gamma": 5.0}, {"min_snr_gamma": 1.0}, {"snr_gamma": 5.0})]  # fmt: skip
    return cases


if __name__ == "__main__":
    record("losses", values)
