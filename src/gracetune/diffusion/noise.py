"""Training noise as a function of the seed and the sample's index, generated on the latents' device.

A sample's noise depends neither on the batch nor on the rank (see `seeded_random`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gracetune.config.run_config import Objective
from gracetune.seeded_random import normals, uniform


@dataclass(frozen=True, eq=False)
class Noise:
    """float32 noise, shaped like the latents [B, C, ...]."""

    target: Tensor
    """The noise in the training target."""
    added: Tensor
    """The noise added to the latents. Differs from `target` only with input perturbation."""


def sample_noise(latents: Tensor, objective: Objective, seed: int, indices: Sequence[int]) -> Noise:
    """`indices` are the samples' global indices: how many samples the run used before each, over all ranks."""
    target = normal_like(latents, seed, "noise", indices)
    if objective.noise_offset > 0:
        target += objective.noise_offset * _offsets(latents, objective.noise_offset_probability, seed, indices)
    added = target
    if objective.input_perturbation > 0:
        added = target + objective.input_perturbation * normal_like(latents, seed, "input_perturbation", indices)
    return Noise(target, added)


def normal_like(latents: Tensor, seed: int, purpose: str, indices: Sequence[int]) -> Tensor:
    """Standard normal noise in float32. `purpose` separates independent noise of the same samples."""
    return _normals(latents, latents.shape[1:], seed, purpose, indices)


def _offsets(latents: Tensor, probability: float, seed: int, indices: Sequence[int]) -> Tensor:
    """One offset per sample and channel, [B, C, 1, ...]; 0 for samples that get none."""
    per_channel = torch.Size([latents.shape[1], *(1,) * (latents.ndim - 2)])
    offsets = _normals(latents, per_channel, seed, "noise_offset", indices)
    for row, index in zip(offsets, indices, strict=True):
        if uniform(seed, "noise_offset_chosen", index) >= probability:
            row.zero_()
    return offsets


def _normals(latents: Tensor, shape: torch.Size, seed: int, purpose: str, indices: Sequence[int]) -> Tensor:
    if len(indices) != latents.shape[0]:
        raise ValueError(f"{len(indices)} sample indices for a batch of {latents.shape[0]}")
    return normals(shape, seed, purpose, indices, latents.device)
