"""Training and sampling must give the denoiser the same latents and model time at the same noise level."""

from __future__ import annotations

import ast
import math
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gracetune.diffusion.schedule import Cosine, noisy, target
from gracetune.models.stable_audio.predict import CosineSolver, solver_from

PUBLISHED = {
    "_class_name": "CosineDPMSolverMultistepScheduler",
    "sigma_min": 0.3,
    "sigma_max": 500,
    "sigma_data": 1.0,
    "sigma_schedule": "exponential",
    "prediction_type": "v_prediction",
    "solver_order": 2,
    "rho": 7.0,
}


def published_time(sigma: Tensor) -> Tensor:
    """The model time of the published scheduler, read from its source file, because importing it needs torchsde."""
    schedulers = find_spec("diffusers.schedulers")
    assert schedulers is not None
    assert schedulers.origin is not None
    path = Path(schedulers.origin).with_name("scheduling_cosine_dpmsolver_multistep.py")
    tree = ast.parse(path.read_text())
    function = next(node for node in ast.walk(tree) if getattr(node, "name", "") == "precondition_noise")
    future = ast.parse("from __future__ import annotations").body
    known: dict[str, Any] = {"torch": torch, "math": math}
    exec(compile(ast.Module([*future, function], []), str(path), "exec"), known)
    time: Tensor = known["precondition_noise"](SimpleNamespace(), sigma)
    return time


@pytest.mark.parametrize("steps", [1, 2, 20, 100])
def test_schedule_levels_equal_the_solvers(steps: int) -> None:
    solver, schedule = solver_from(PUBLISHED), Cosine()
    solver.set_timesteps(steps)
    sigmas = solver.sigmas[:-1]
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(len(sigmas), 4, 8, generator=generator) for _ in range(2))
    level = sigmas.atan() / (math.pi / 2)
    torch.testing.assert_close(schedule.model_time(level), solver.timesteps)
    torch.testing.assert_close(published_time(sigmas), solver.timesteps)
    dirty = clean + sigmas[:, None, None] * noise
    seen = noisy(schedule, clean, noise, level)
    torch.testing.assert_close(seen, solver.precondition_inputs(dirty, sigmas[:, None, None]), rtol=0, atol=1e-5)
    # A denoiser that predicts the training target leads the solver to the clean latents. Sigma amplifies rounding.
    answer = target(schedule, clean, noise, level).double()
    found = solver.precondition_outputs(dirty.double(), answer, sigmas[:, None, None].double())
    torch.testing.assert_close(found.float(), clean, rtol=0, atol=1e-3)


def test_perfect_denoiser_leads_to_the_clean_latents() -> None:
    solver, schedule = solver_from(PUBLISHED), Cosine()
    clean = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1))
    solver.set_timesteps(12)
    latents = torch.randn(clean.shape, generator=torch.Generator().manual_seed(2)) * solver.init_noise_sigma
    for time in solver.timesteps:
        seen = solver.scale_model_input(latents, time)
        a, s = schedule.coefficients(time[None])
        noise = (seen - a * clean) / s
        latents = solver.step(target(schedule, clean, noise, time[None]), time, latents).prev_sample
    torch.testing.assert_close(latents, clean, rtol=0, atol=1e-3)


def test_published_configuration_is_kept() -> None:
    solver = solver_from({**PUBLISHED, "sigma_max": 80, "_diffusers_version": "0.30"})
    assert isinstance(solver, CosineSolver)
    assert (solver.config.sigma_max, solver.config.sigma_min, solver.config.prediction_type) == (
        80,
        0.3,
        "v_prediction",
    )
