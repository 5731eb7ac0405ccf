#!/usr/bin/env python3
"""SimpleTuner's noise levels: quantiles of 20,000 sigmas (or timesteps, for SDXL) for each setting and latent size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from common import quantiles, record
from simpletuner_models import model_of

DRAWS = 20_000
MEGAPIXEL, QUARTER, CLIP = (16, 128, 128), (16, 64, 64), (16, 5, 60, 104)
SIZES: dict[str, list[tuple[int, ...]]] = {
    "flux": [MEGAPIXEL, QUARTER],
    "qwen_image": [MEGAPIXEL, QUARTER],
    "wan": [CLIP],
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"flow_schedule_shift": 1.0},
    {"flow_schedule_shift": 0},
    {"flow_sigmoid_scale": 0.5},
    {"flow_use_uniform_schedule": True},
    {"flow_use_uniform_schedule": True, "flow_schedule_shift": 7.0},
    {"flow_use_beta_schedule": True},
    {"flow_use_beta_schedule": True, "flow_beta_schedule_alpha": 4.0, "flow_beta_schedule_beta": 1.5},
    {"flow_use_beta_schedule": True, "flow_use_uniform_schedule": True, "flow_schedule_shift": 1.0},
]
BY_SIZE: list[dict[str, Any]] = [
    {"flow_schedule_auto_shift": True},
    {"flow_schedule_auto_shift": True, "flow_use_uniform_schedule": True},
]


def flow(family: str, size: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    noise = torch.zeros(1, *size).expand(DRAWS, *size)  # only the size counts
    sigmas, _ = model_of(family, options).sample_flow_sigmas({"latents": noise, "noise": noise}, {})
    return {"family": family, "size": size, "options": options, "quantiles": quantiles(sigmas.tolist())}


def discrete(batch: int) -> dict[str, Any]:
    """By position in a batch: with more than one sample each has a part of the timesteps of its own."""
    from simpletuner.helpers.training.custom_schedule import generate_timestep_weights, segmented_timestep_selection

    torch.manual_seed(0)
    model = model_of("sdxl", {})
    steps = model.noise_schedule.config.num_train_timesteps
    found: list[list[int]] = []
    for _ in range(DRAWS // batch):
        weights = generate_timestep_weights(model.config, steps)
        if batch == 1:
            found.append(torch.multinomial(weights, 1, replacement=True).tolist())
        else:
            found.append(segmented_timestep_selection(steps, batch, weights, model.config).tolist())
    # The level of step t is (t + 1) / 1000.
    positions = [quantiles([(one[at] + 1) / steps for one in found]) for at in range(batch)]
    return {"family": "sdxl", "batch": batch, "options": {}, "positions": positions}


def values(_peer: Path) -> Any:
    cases = [flow(family, sizes[0], options) for family, sizes in SIZES.items() for options in SETTINGS]
    cases += [flow(family, size, options) for family, sizes in SIZES.items() for size in sizes for options in BY_SIZE]
    return [*cases, *(discrete(batch) for batch in (1, 2, 4))]


if __name__ == "__main__":
    record("levels", values)
