"""The solver samples are drawn with.

The published folder names `CosineDPMSolverMultistepScheduler`, a stochastic solver that needs torchsde. This one has
the same noise levels, scales its input and output alike and tells the denoiser the same time for a level; it follows
the deterministic path (DPM-Solver++ of second order), which needs nothing more. diffusers' own
`EDMDPMSolverMultistepScheduler` is all that but for the time: it says log(sigma) / 4, which these weights never heard.
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
"""What both schedulers' configurations say, and mean alike."""


class CosineSolver(EDMDPMSolverMultistepScheduler):
    def precondition_noise(self, sigma: float | Tensor) -> Tensor:
        """The time the denoiser is told: the level of `diffusion.schedule.Cosine`, where sigma is tan(pi level / 2)."""
        return torch.as_tensor(sigma).atan() / (math.pi / 2)


def solver_from(config: Mapping[str, Any]) -> CosineSolver:
    """`config`: the folder's scheduler_config.json, of either class."""
    solver: type[Any] = CosineSolver
    made: CosineSolver = solver(**{key: config[key] for key in _SHARED if key in config})
    return made
