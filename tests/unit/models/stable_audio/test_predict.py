"""`predict` on entries of our encoders, compared with the denoiser calls of diffusers' own pipeline."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gracetune.adapters.targets import names
from gracetune.diffusion.schedule import noisy, target
from gracetune.models.spec import PartPlacement
from gracetune.models.stable_audio.spec import SPEC
from unit.models.stable_audio.cases import CPU, TinyModel, batched, entries, pipeline_of, record, sound, source_of

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
    chosen = {path for path in linears if any(names(pattern, path) for pattern in SPEC.default_targets)}
    assert all(any(names(pattern, path) for path in linears) for pattern in SPEC.default_targets)
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
