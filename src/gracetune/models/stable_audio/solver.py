"""The solver that generates samples.

The published folder names `CosineDPMSolverMultistepScheduler`, a stochastic solver that needs torchsde. This one has
the same noise levels, input and output scaling and model time, but follows the deterministic path (second-order
DPM-Solver++) and needs no further package. It is diffusers' `EDMDPMSolverMultistepScheduler` with another model time:
that class passes log(sigma) / 4, which these weights were not trained with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import EDMDPMSolverMultistepScheduler
from torch import Tensor

_SHARED = (
    "sigma_min", "sigma_max", "sigma_data", "sigma_schedule", "num_train_timesteps", "prediction_type", "rho",
    "solver_order", "solver_type", "lower_order_final", "euler_at_final", "final_sigmas_type",
)  # fmt: skip
"""Settings that both schedulers have, with the same meaning."""


class CosineSolver(EDMDPMSolverMultistepScheduler):
    def precondition_noise(self, sigma: float | Tensor) -> Tensor:
        """The time the denoiser gets: the level of `diffusion.schedule.Cosine`, where sigma is tan(pi level / 2)."""
        return torch.as_tensor(sigma).atan() / (math.pi / 2)


def solver_from(config: Mapping[str, Any]) -> CosineSolver:
    """`config` is the folder's scheduler_config.json, of either class."""
    solver: type[Any] = CosineSolver
    made: CosineSolver = solver(**{key: config[key] for key in _SHARED if key in config})
    return made
