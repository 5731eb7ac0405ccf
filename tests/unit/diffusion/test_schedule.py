"""Our schedules compared with diffusers' own."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import DDPMScheduler, EDMDPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st

from gracetune.diffusion.schedule import Cosine, Ddpm, Flow, NoiseSchedule, noisy, target

CLEAN = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))
NOISE = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(2))
SDXL = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")


def table(prediction: str = "epsilon") -> Ddpm:
    return Ddpm(tuple(SDXL.alphas_cumprod.tolist()), prediction)  # type: ignore[arg-type]


def test_level_maps_back_to_its_step() -> None:
    steps = torch.arange(1000)
    schedule = table()
    for levels in ((steps.float() + 1) / 1000, (steps.double() + 1) / 1000):
        assert torch.equal(schedule.model_time(levels), steps)


def test_ddpm_equals_diffusers() -> None:
    steps = torch.tensor([0, 10, 500, 999])
    level = (steps.float() + 1) / 1000
    torch.testing.assert_close(noisy(table(), CLEAN, NOISE, level), SDXL.add_noise(CLEAN, NOISE, steps))
    torch.testing.assert_close(
        target(table("v_prediction"), CLEAN, NOISE, level), SDXL.get_velocity(CLEAN, NOISE, steps)
    )
    assert torch.equal(target(table(), CLEAN, NOISE, level), NOISE)


def test_flow_equals_diffusers() -> None:
    theirs = FlowMatchEulerDiscreteScheduler()
    steps = theirs.timesteps[[0, 250, 500, 999]]
    level = steps / 1000
    torch.testing.assert_close(noisy(Flow(), CLEAN, NOISE, level), theirs.scale_noise(CLEAN, steps, NOISE))
    torch.testing.assert_close(Flow().model_time(level), steps)


def test_cosine_equals_edm_preconditioning() -> None:
    """At sigma the pipeline feeds (x + sigma e) / sqrt(sigma^2 + 1) and the time atan(sigma) 2 / pi."""
    theirs = EDMDPMSolverMultistepScheduler(sigma_data=1.0, prediction_type="v_prediction")
    for sigma in (0.05, 1.0, 20.0):
        level = torch.full((4,), math.atan(sigma) * 2 / math.pi)
        fed = theirs.precondition_inputs(CLEAN + sigma * NOISE, sigma)
        torch.testing.assert_close(noisy(Cosine(), CLEAN, NOISE, level), fed)
        # A correct prediction must reproduce the clean latents by diffusers' own formula.
        back = theirs.precondition_outputs(CLEAN + sigma * NOISE, target(Cosine(), CLEAN, NOISE, level), sigma)
        torch.testing.assert_close(back, CLEAN, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("schedule", [Flow(), table(), table("v_prediction"), Cosine()])
@given(level=st.floats(1e-3, 1.0))
def test_noisy_latents_and_target_determine_clean_and_noise(schedule: NoiseSchedule, level: float) -> None:
    """(noisy, target) determines (x, e): the target is never a copy of the input."""
    levels = torch.full((4,), level)
    a, s = (part[0].double() for part in schedule.coefficients(levels))
    seen = noisy(schedule, CLEAN, NOISE, levels).double()
    requested = target(schedule, CLEAN, NOISE, levels).double()
    if schedule.prediction == "flow":
        clean = seen - s * requested
    elif schedule.prediction == "epsilon":
        clean = (seen - s * requested) / a
    else:
        clean = a * seen - s * requested
    torch.testing.assert_close(clean, CLEAN.double(), atol=2e-3, rtol=2e-3)


def test_half_precision_latents_are_noised_in_float32() -> None:
    level = torch.tensor([0.3, 0.5, 0.7, 0.9])
    mixed = noisy(Flow(), CLEAN.bfloat16(), NOISE.bfloat16(), level)
    assert mixed.dtype == torch.bfloat16
    exact = noisy(Flow(), CLEAN.bfloat16().float(), NOISE.bfloat16().float(), level)
    assert torch.equal(mixed, exact.bfloat16())
