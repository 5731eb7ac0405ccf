"""FLUX.1 compared with diffusers' own pipelines."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxKontextPipeline, FluxPipeline

from gracetune.cache.encoder import Prompt
from gracetune.data.errors import DataError
from gracetune.errors import ConfigError
from gracetune.models.flux.spec import SPEC
from gracetune.models.spec import SampleRequest
from unit.models import loaded
from unit.models.image_families import (
    CPU,
    LONG,
    SHORT,
    TOLERANCE,
    WIDE,
    assert_id_tells_apart,
    assert_same_inputs,
    batch_of,
    check_gradients,
    check_half_precision,
    check_targets_are_counted,
    copied,
    image,
    rewrite,
    sample_of,
    source,
    watched,
)
from unit.models.loaded import latent_encoder, text_encoder

FLAVOURS = ("dev", "schnell", "kontext")
REFERENCE = (32, 64)
SCALE = 8


@pytest.fixture
def small_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kontext enlarges every reference to a megapixel."""
    module = "diffusers.pipelines.flux.pipeline_flux_kontext"
    monkeypatch.setattr(f"{module}.PREFERRED_KONTEXT_RESOLUTIONS", [REFERENCE, (64, 64)])


def entries(folder: Path, *captions: str) -> list[dict[str, torch.Tensor]]:
    edits = SPEC.inspect(source(folder)).flavour == "kontext"
    latents = latent_encoder(SPEC.family, folder)
    texts = text_encoder(SPEC.family, folder).encode([Prompt(caption) for caption in captions])
    references = [sample_of(image(10 + seed, REFERENCE)) for seed in range(len(captions))]
    samples = [sample_of(image(seed), *references[seed : seed + edits]) for seed in range(len(captions))]
    return [{**text, **sample} for text, sample in zip(texts, latents.encode(samples), strict=True)]


def arguments(pipeline: Any, folder: Path) -> dict[str, Any]:
    given: dict[str, Any] = {"width": WIDE[0], "height": WIDE[1], "guidance_scale": 1.0}
    if isinstance(pipeline, FluxKontextPipeline):
        given["max_area"] = WIDE[0] * WIDE[1]
    return {**given, "max_sequence_length": SPEC.inspect(source(folder)).details["caption_tokens"]}


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.usefixtures("small_references")
def test_predict_equals_the_pipelines_call(flavour: str, tiny_model: Callable[[str, str], Path]) -> None:
    folder = tiny_model("flux", flavour)
    facts = SPEC.inspect(source(folder))
    pipeline = loaded.pipeline(SPEC.family, folder)
    given = arguments(pipeline, folder)
    if flavour == "kontext":
        given["image"] = [image(10, REFERENCE), image(11, REFERENCE)]
    with watched(pipeline.transformer) as theirs:
        pipeline(prompt=[SHORT, LONG], num_inference_steps=3, output_type="latent", **given)
    batch, tokens = batch_of(*entries(folder, SHORT, LONG)), WIDE[0] * WIDE[1] // (2 * SCALE) ** 2
    for inputs, answer in zip(theirs.inputs, theirs.answers, strict=True):
        noisy, expected = (
            FluxPipeline._unpack_latents(part[:, :tokens], WIDE[1], WIDE[0], SCALE)
            for part in (inputs["hidden_states"], answer)
        )
        with torch.no_grad(), watched(pipeline.transformer) as ours:
            predicted = SPEC.predict(pipeline.transformer, noisy, inputs["timestep"], batch, facts)
        torch.testing.assert_close(predicted, expected, **TOLERANCE)
        assert_same_inputs(ours.inputs[0], inputs)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_facts_from_the_files(flavour: str, tiny_model: Callable[[str, str], Path]) -> None:
    facts = SPEC.inspect(source(tiny_model("flux", flavour)))
    assert facts.flavour == flavour
    assert facts.details["guidance"] == (None if flavour == "schnell" else 1.0)
    assert facts.details["caption_tokens"] == (256 if flavour == "schnell" else 512)
    assert facts.shift == pytest.approx(1.0 if flavour == "schnell" else 3.158, abs=1e-3)


@pytest.mark.parametrize("tokens", [256, 1024, 4096, 6000])
def test_shift_of_a_size_equals_the_samplers(tokens: int, tiny_model: Callable[[str, str], Path]) -> None:
    folder = tiny_model("flux", "dev")
    rule = SPEC.inspect(source(folder)).details["resolution_shift"]
    scheduler = loaded.pipeline(SPEC.family, folder).scheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    scheduler.set_timesteps(sigmas=[0.25, 0.5], mu=calculate_shift(tokens))
    shift, plain = rule.at(tokens), torch.tensor([0.25, 0.5])
    torch.testing.assert_close(scheduler.sigmas[:2], shift * plain / (1 + (shift - 1) * plain), **TOLERANCE)


@pytest.mark.parametrize("flavour", ["dev", "kontext"])
@pytest.mark.usefixtures("small_references")
def test_latents_decode_to_the_vaes_reconstruction(flavour: str, tiny_model: Callable[[str, str], Path]) -> None:
    folder = tiny_model("flux", flavour)
    [entry] = entries(folder, SHORT)
    pipeline = loaded.pipeline(SPEC.family, folder)
    packed = FluxPipeline._pack_latents(entry["latents"][None], 1, 16, WIDE[1] // SCALE, WIDE[0] // SCALE)
    generated = pipeline(
        prompt=SHORT,
        num_inference_steps=1,
        output_type="pt",
        callback_on_step_end=lambda *_: {"latents": packed},
        **arguments(pipeline, folder),
    ).images
    with torch.no_grad():
        latents = pipeline.vae.encode(sample_of(image()).pixels[None]).latent_dist.mode()
        through = pipeline.vae.decode(latents).sample
    torch.testing.assert_close(generated, through.mul(0.5).add(0.5).clamp(0, 1), **TOLERANCE)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_batch_equals_its_single_samples(flavour: str, tiny_model: Callable[[str, str], Path]) -> None:
    folder = tiny_model("flux", flavour)
    facts, both = SPEC.inspect(source(folder)), entries(folder, SHORT, LONG)
    transformer = SPEC.load_denoiser(source(folder), facts.experts[0], CPU)
    noisy, level = torch.randn(2, 16, 4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0.2, 0.9])
    with torch.no_grad():
        together = SPEC.predict(transformer, noisy, level, batch_of(*both), facts)
        alone = [
            SPEC.predict(transformer, noisy[n : n + 1], level[n : n + 1], batch_of(both[n]), facts) for n in (0, 1)
        ]
        swapped = SPEC.predict(transformer, noisy, level, batch_of(*both[::-1]), facts)
    torch.testing.assert_close(together, torch.cat(alone), **TOLERANCE)
    assert (together - swapped).abs().max() > 1e-3


@pytest.mark.parametrize(
    "flavour", ["dev", pytest.param("schnell", marks=pytest.mark.full), pytest.param("kontext", marks=pytest.mark.full)]
)
def test_half_precision(flavour: str, tiny_model: Callable[[str, str], Path]) -> None:
    folder = tiny_model("flux", flavour)
    check_half_precision(SPEC, folder, entries(folder, SHORT, LONG), torch.randn(2, 16, 4, 6))


@pytest.mark.parametrize(
    "flavour", [pytest.param("dev", marks=pytest.mark.full), pytest.param("schnell", marks=pytest.mark.full), "kontext"]
)
def test_every_default_target_gets_a_gradient(flavour: str, tiny_model: Callable[[str, str], Path]) -> None:
    folder = tiny_model("flux", flavour)
    facts, both = SPEC.inspect(source(folder)), entries(folder, SHORT, LONG)
    transformer = SPEC.load_denoiser(source(folder), facts.experts[0], CPU)
    noisy, level = torch.randn(2, 16, 4, 6), torch.tensor([0.2, 0.9])
    check_gradients(
        SPEC, facts, transformer, lambda: SPEC.predict(transformer, noisy, level, batch_of(*both), facts).square().sum()
    )
    check_targets_are_counted(SPEC)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.usefixtures("small_references")
def test_samples_have_the_requested_size(flavour: str, tiny_model: Callable[[str, str], Path]) -> None:
    pipeline = loaded.pipeline(SPEC.family, tiny_model("flux", flavour))
    references = (image(10, REFERENCE),) if flavour == "kontext" else ()
    request = SampleRequest(SHORT, width=WIDE[0], height=WIDE[1], steps=2, seed=3, references=references)
    [frame] = SPEC.sample(pipeline, request).frames
    assert frame.size == WIDE
    assert SPEC.sample(pipeline, request).frames[0].tobytes() == frame.tobytes()
    assert SPEC.sample(pipeline, replace(request, prompt=LONG)).frames[0].tobytes() != frame.tobytes()
    if flavour == "kontext":
        other = replace(request, references=(image(11, REFERENCE),))
        assert SPEC.sample(pipeline, other).frames[0].tobytes() != frame.tobytes()


@pytest.mark.parametrize(("guidance", "given"), [(None, 3.5), (2.0, 2.0)])
def test_the_guidance_of_a_sample(guidance: float | None, given: float, tiny_model: Callable[[str, str], Path]) -> None:
    pipeline = loaded.pipeline(SPEC.family, tiny_model("flux", "dev"))
    with watched(pipeline.transformer) as calls:
        SPEC.sample(pipeline, SampleRequest(SHORT, width=32, height=32, steps=1, guidance=guidance))
    assert calls.inputs[0]["guidance"].tolist() == [given]


def test_ignored_negative_prompt_warns(tiny_model: Callable[[str, str], Path]) -> None:
    pipeline = loaded.pipeline(SPEC.family, tiny_model("flux", "schnell"))
    request = SampleRequest(SHORT, width=32, height=32, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        SPEC.sample(pipeline, request)
    with pytest.warns(UserWarning, match="negative prompt"):
        SPEC.sample(pipeline, replace(request, negative_prompt="ugly"))


# -- what goes into an entry ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flavour", "count", "takes"), [("dev", 1, "supports none"), ("kontext", 2, "at most 1")])
def test_too_many_references(flavour: str, count: int, takes: str, tiny_model: Callable[[str, str], Path]) -> None:
    encoder = latent_encoder(SPEC.family, tiny_model("flux", flavour))
    with pytest.raises(DataError, match=takes):
        encoder.encode([sample_of(image(), *[sample_of(image(1))] * count)])


def test_ids(tiny_model: Callable[[str, str], Path]) -> None:
    assert_id_tells_apart(SPEC, tiny_model("flux", "dev"))


def test_a_size_the_pipeline_would_round(tiny_model: Callable[[str, str], Path]) -> None:
    pipeline = loaded.pipeline(SPEC.family, tiny_model("flux", "dev"))
    with pytest.raises(ConfigError, match=r"width\n.*40\n.*a multiple of 16\n"):
        SPEC.sample(pipeline, SampleRequest(SHORT, width=40, height=32))


# -- rejections -------------------------------------------------------------------------------------------------------


def test_a_folder_of_another_family(tiny_model: Callable[[str, str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"StableDiffusionXLPipeline[\s\S]*FluxPipeline[\s\S]*model.family"):
        SPEC.inspect(source(tiny_model("sdxl", "base-1.0")))


def test_a_flux_of_another_kind(tiny_model: Callable[[str, str], Path], tmp_path: Path) -> None:
    folder = copied(tiny_model("flux", "dev"), tmp_path)
    rewrite(folder / "model_index.json", _class_name="FluxFillPipeline")
    with pytest.raises(ConfigError, match="FluxFillPipeline"):
        SPEC.inspect(source(folder))


def test_all_missing_parts_are_named(tiny_model: Callable[[str, str], Path], tmp_path: Path) -> None:
    folder = copied(tiny_model("flux", "dev"), tmp_path)
    (folder / "text_encoder_2").rename(tmp_path / "gone")
    (folder / "scheduler" / "scheduler_config.json").unlink()
    with pytest.raises(ConfigError) as rejected:
        SPEC.inspect(source(folder))
    assert [problem.found for problem in rejected.value.problems] == [
        "no folder text_encoder_2",
        "scheduler without scheduler_config.json",
    ]


@pytest.mark.parametrize(
    ("flavour", "count", "named"),
    [("dev", 1, "does not edit"), ("kontext", 0, "to edit"), ("kontext", 2, "at most 1")],
)
def test_a_sample_with_the_wrong_number_of_references(
    flavour: str, count: int, named: str, tiny_model: Callable[[str, str], Path]
) -> None:
    pipeline = loaded.pipeline(SPEC.family, tiny_model("flux", flavour))
    with pytest.raises(ConfigError, match=named):
        SPEC.sample(pipeline, SampleRequest(SHORT, references=(image(),) * count))
