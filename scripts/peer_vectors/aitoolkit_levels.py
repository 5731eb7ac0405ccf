#!/usr/bin/env python3
"""ai-toolkit's noise levels: quantiles of 20,000 timesteps for each setting, arch and latent size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from aitoolkit_trainer import BatchOf, trainer_for
from common import quantiles, record

DRAWS, BATCH = 20_000, 100
MEGAPIXEL, QUARTER = (16, 128, 128), (16, 64, 64)
CLIP = (16, 5, 60, 104)
FLOW_ARCHS: dict[str, list[tuple[int, ...]]] = {
    "flux": [MEGAPIXEL, QUARTER], "flux_kontext": [MEGAPIXEL, QUARTER], "qwen_image": [MEGAPIXEL, QUARTER],
    "qwen_image_edit": [MEGAPIXEL], "qwen_image_edit_plus": [MEGAPIXEL], "wan21": [CLIP], "wan21_i2v": [CLIP],
    "wan22_5b": [CLIP],
}  # fmt: skip
EXPERTS = {"wan22_14b": CLIP, "wan22_14b_i2v": CLIP}
KINDS = ("sigmoid", "linear", "weighted", "shift", "one_step")


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for arch, sizes in FLOW_ARCHS.items():
        for size in sizes:
            found += [{"arch": arch, "size": size, "train": {"timestep_type": kind}} for kind in KINDS]
    flux: dict[str, Any] = {"arch": "flux", "size": MEGAPIXEL}
    found += [{**flux, "train": {"timestep_type": kind}} for kind in ("flux_shift", "lumina2_shift")]
    found.append({**flux, "train": {"timestep_type": "sigmoid", "linear_timesteps": True}})
    for kind in ("sigmoid", "linear", "shift"):
        for bias in ("content", "style"):
            found.append({**flux, "train": {"timestep_type": kind, "content_or_style": bias}})
            found.append({**flux, "train": {"timestep_type": kind, "content_or_style": bias,
                                            "min_denoising_steps": 200, "max_denoising_steps": 600}})  # fmt: skip
        found.append({**flux, "train": {"timestep_type": kind, "min_denoising_steps": 200,
                                        "max_denoising_steps": 600}})  # fmt: skip
    for arch, size in EXPERTS.items():
        for expert in (0, 1):
            for kind in KINDS[:4]:
                for bias in ("balanced", "content", "style"):
                    train = {"timestep_type": kind, "content_or_style": bias}
                    found.append({"arch": arch, "size": size, "expert": expert, "train": train})
    ranges: tuple[dict[str, int], ...] = ({}, {"min_denoising_steps": 200, "max_denoising_steps": 600})
    for limits in ranges:
        for bias in ("balanced", "content", "style"):
            discrete: dict[str, Any] = {"noise_scheduler": "ddpm", "content_or_style": bias, **limits}
            found.append({"arch": "sdxl", "size": (4, 128, 128), "train": discrete})
    return found


def picks_random(train: dict[str, Any]) -> bool:
    """The bias picks from random timesteps, which are new for every batch: all samples of one would be alike."""
    return train.get("timestep_type") == "sigmoid" and train.get("content_or_style", "balanced") != "balanced"


def levels(case: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    trainer = trainer_for(case["arch"], case["train"])
    trainer.current_boundary_index = case.get("expert", 0)
    # Noise and noisy latents are not what is recorded, and only the size of the latents counts.
    trainer.get_noise = lambda latents, *arguments, **options: latents
    trainer.sd.add_noise = lambda latents, *arguments, **options: latents
    batch = BatchOf(torch.zeros(1, 1, *case["size"][1:]), count=1 if picks_random(case["train"]) else BATCH)
    found: list[float] = []
    while len(found) < DRAWS:
        timesteps = trainer.process_general_training_batch(batch)[2]
        # Of a model with a table of steps, the level of step t is (t + 1) / 1000.
        found += [(float(step) + (case["arch"] == "sdxl")) / 1000 for step in timesteps]
    return {**case, "quantiles": quantiles(found)}


def values(_peer: Path) -> Any:
    return [levels(case) for case in cases()]


if __name__ == "__main__":
    record("levels", values)
