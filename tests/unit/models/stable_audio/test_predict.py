"""`predict` on entries of our encoders, compared with the denoiser calls of diffusers' own pipeline.

Training and sampling must give the denoiser the same latents and model time at the same noise level.
"""

from __future__ import annotations

import ast
import math
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from gracetune.adapters.targets import matches_path
from gracetune.diffusion.schedule import Cosine, noisy, target
from gracetune.errors import ConfigError
from gracetune.models.spec import PartPlacement, SampleRequest
from gracetune.models.stable_audio.predict import CosineSolver, solver_from
from gracetune.models.stable_audio.spec import SPEC
from unit.models import loaded
from unit.models.stable_audio.cases import (
    CPU,
    HOP,
    RATE,
    TinyModel,
    batched,
    entries,
    pipeline_of,
    record,
    sound,
    source_of,
)

CAPTION, AVOIDED = "a dog, 日本 👀", "the sound of the red cat"
EXACT = {"rtol": 0.0, "atol": 1e-5}
START, END = 0.5, 0.5 + 8 * 2048 / 44_100
"""Of the sample below, in seconds."""


@pytest.mark.parametrize("avoided", [None, AVOIDED], ids=["nothing avoided", "a caption avoided"])
def test_denoiser_inputs_equal_the_pipelines(tiny_model: TinyModel, avoided: str | None) -> None:
    """Guidance batches the caption with no caption: the latter is our empty caption."""
    source = source_of(tiny_model)
    pipeline, facts = pipeline_of(source), SPEC.inspect(source)
    calls = record(pipeline.transformer)
    pipeline(
        CAPTION,
        negative_prompt=avoided,
        audio_start_in_s=START,
        audio_end_in_s=END,
        num_inference_steps=3,
        guidance_scale=7.0,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    )
    batch = batched(entries(source, sound(start=START), avoided or "", CAPTION))
    assert batch["seconds"].tolist() == [pytest.approx([START, END])] * 2
    denoiser = SPEC.load_denoiser(source, facts.experts[0], CPU)
    ours = record(denoiser)
    assert len(calls) == 3
    for call in calls:
        with torch.no_grad():
            answer = SPEC.predict(denoiser, call.states, call.time.expand(2), batch, facts)
        torch.testing.assert_close(answer, call.answer, **EXACT)
        for name in ("encoder_hidden_states", "global_hidden_states"):
            torch.testing.assert_close(ours[-1].requested[name], call.requested[name], **EXACT)
        for own, theirs in zip(ours[-1].requested["rotary_embedding"], call.requested["rotary_embedding"], strict=True):
            torch.testing.assert_close(own, theirs, **EXACT)


def test_batch_equals_its_single_samples(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model)
    facts = SPEC.inspect(source)
    denoiser = SPEC.load_denoiser(source, facts.experts[0], CPU)
    batches = [
        *entries(source, sound(seed=1), "a dog"),
        *entries(source, sound(seed=2, start=3.0), "a sound of the red cat in the snow"),
        *entries(source, sound(seed=3), ""),
    ]
    together, level = batched(batches), torch.tensor([0.2, 0.7, 0.9])
    states = noisy(facts.schedule, together["latents"], torch.randn(together["latents"].shape), level)
    answer = SPEC.predict(denoiser, states, level, together, facts)
    assert answer.shape == states.shape
    for index, batch in enumerate(batches):
        alone = SPEC.predict(denoiser, states[index : index + 1], level[index : index + 1], batch, facts)
        torch.testing.assert_close(answer[index : index + 1], alone, **EXACT)


def test_gradients_reach_every_default_target(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model)
    facts = SPEC.inspect(source)
    (batch,) = entries(source, sound(), CAPTION)
    level, noise = torch.tensor([0.6]), torch.randn(batch["latents"].shape)
    denoiser = SPEC.load_denoiser(source, facts.experts[0], CPU)
    linears = {path: module for path, module in denoiser.named_modules() if isinstance(module, nn.Linear)}
    chosen = {path for path in linears if any(matches_path(pattern, path) for pattern in SPEC.default_targets)}
    assert all(any(matches_path(pattern, path) for path in linears) for pattern in SPEC.default_targets)
    assert len(chosen) == 10 * len(denoiser.get_submodule("transformer_blocks"))
    for path in chosen:
        linears[path].weight.requires_grad_()
    answer = SPEC.predict(denoiser, noisy(facts.schedule, batch["latents"], noise, level), level, batch, facts)
    (answer - target(facts.schedule, batch["latents"], noise, level)).square().mean().backward()
    for path in chosen:
        gradient = linears[path].weight.grad
        assert gradient is not None, path
        assert float(gradient.abs().max()) > 0, path


def test_everything_follows_the_dtype_of_the_noisy_latents(tiny_model: TinyModel) -> None:
    source, half = source_of(tiny_model), PartPlacement(torch.device("cpu"), torch.bfloat16)
    facts = SPEC.inspect(source)
    (batch,) = entries(source, sound(), CAPTION)
    states, level = torch.randn(batch["latents"].shape), torch.tensor([0.5])
    expected = SPEC.predict(SPEC.load_denoiser(source, facts.experts[0], CPU), states, level, batch, facts)
    answer = SPEC.predict(SPEC.load_denoiser(source, facts.experts[0], half), states.bfloat16(), level, batch, facts)
    assert answer.dtype == torch.bfloat16
    torch.testing.assert_close(answer.float(), expected, rtol=0.0, atol=0.1 * float(expected.abs().max()))


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


@pytest.mark.parametrize(("seconds", "samples", "avoided"), [(0.0, 32 * HOP, ""), (1.0, RATE, "noise")])
def test_audio_has_the_requested_length(tiny_model: TinyModel, seconds: float, samples: int, avoided: str) -> None:
    pipeline = loaded.pipeline("stable_audio", source_of(tiny_model).folder)
    request = SampleRequest("a dog", avoided, seconds=seconds, steps=3, seed=5)
    generated = SPEC.sample(pipeline, request)
    assert generated.frames == ()
    assert generated.sample_rate == RATE
    assert generated.audio is not None
    assert generated.audio.shape == (2, samples)
    assert bool(generated.audio.isfinite().all())
    assert float(generated.audio.std()) > 0
    again = SPEC.sample(pipeline, request).audio
    assert again is not None
    assert torch.equal(generated.audio, again)


def test_the_given_denoiser_is_used(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model)
    (expert,) = SPEC.inspect(source).experts
    denoiser = SPEC.load_denoiser(source, expert, CPU)
    assert SPEC.load_pipeline(source, {"transformer": denoiser}, CPU).transformer is denoiser


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (SampleRequest("a dog", seconds=9.0), "seconds\n.*9\n.*from 0 to 1.5"),
        (SampleRequest("a dog", references=(Image.new("RGB", (8, 8)),)), "references"),
    ],
)
def test_unsupported_requests_are_rejected(tiny_model: TinyModel, request_: SampleRequest, message: str) -> None:
    pipeline = loaded.pipeline("stable_audio", source_of(tiny_model).folder)
    with pytest.raises(ConfigError, match=message):
        SPEC.sample(pipeline, request_)
