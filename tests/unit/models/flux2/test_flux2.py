"""FLUX.2 dev and klein compared with diffusers' own pipelines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

from gracetune.cache.encoder import Prompt
from gracetune.config.rules import broken_rules
from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError
from gracetune.models.fact_overrides import check_distilled, facts_of
from gracetune.models.flux2.spec import SPEC
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

FLAVOURS = ("dev", "klein-base-4b")
PATCH, PATCH_PIXELS = 2, 16
REFERENCES = ((64, 80), (96, 64))
TinyModel = Callable[[str, str], Path]


def entries(folder: Path, *captions: str, references: int = 0) -> list[dict[str, torch.Tensor]]:
    texts = text_encoder(SPEC.family, folder).encode([Prompt(caption) for caption in captions])
    given = [sample_of(image(10 + seed, REFERENCES[seed])) for seed in range(references)]
    images = [sample_of(image(seed), *given) for seed in range(len(captions))]
    latents = latent_encoder(SPEC.family, folder).encode(images)
    return [{**text, **one} for text, one in zip(texts, latents, strict=True)]


def as_latents(tokens: torch.Tensor, size: tuple[int, int] = WIDE) -> torch.Tensor:
    """The pipeline's tokens [B, rows x columns, C x 4] as latents [B, C, H, W]."""
    rows, columns = size[1] // PATCH_PIXELS, size[0] // PATCH_PIXELS
    squares = tokens.unflatten(1, (rows, columns)).unflatten(-1, (-1, PATCH, PATCH))
    return squares.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


@pytest.mark.parametrize("references", [0, 2])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_predict_equals_the_pipelines_step(flavour: str, references: int, tiny_model: TinyModel) -> None:
    """The same inputs, positions included, the same answer, and with the scheduler the same next latents."""
    folder = tiny_model("flux2", flavour)
    facts, pipeline = SPEC.inspect(source(folder)), loaded.pipeline(SPEC.family, folder)
    captions, after = [SHORT, LONG], []

    def note(_pipeline: object, _step: int, _time: object, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        after.append(as_latents(state["latents"].clone()))
        return {}

    given = [image(10 + seed, REFERENCES[seed]) for seed in range(references)]
    with watched(pipeline.transformer) as theirs:
        pipeline(prompt=[*captions], image=given or None, num_inference_steps=3, guidance_scale=1.0, width=WIDE[0],
                 height=WIDE[1], output_type="latent", callback_on_step_end=note)  # fmt: skip
    batch = batch_of(*entries(folder, *captions, references=references))
    levels, tokens = pipeline.scheduler.sigmas, WIDE[0] * WIDE[1] // PATCH_PIXELS**2
    for step, (inputs, answer) in enumerate(zip(theirs.inputs, theirs.answers, strict=True)):
        noisy = as_latents(inputs["hidden_states"][:, :tokens])
        with torch.no_grad(), watched(pipeline.transformer) as ours:
            predicted = SPEC.predict(pipeline.transformer, noisy, levels[step].expand(2), batch, facts)
        torch.testing.assert_close(predicted, as_latents(answer[:, :tokens]), **TOLERANCE)
        [mine] = ours.inputs
        positions = {name: mine.pop(name).expand(2, -1, -1) for name in ("img_ids", "txt_ids")}
        assert_same_inputs(
            {**mine, **positions}, {n: one for n, one in inputs.items() if n != "joint_attention_kwargs"}
        )
        stepped = noisy + (levels[step + 1] - levels[step]) * predicted
        torch.testing.assert_close(stepped, after[step], **TOLERANCE)


@pytest.mark.parametrize("flavour", ["dev", "klein-base-4b", "klein-4b", "klein-base-9b", "klein-9b"])
def test_facts_from_the_files(flavour: str, tiny_model: TinyModel) -> None:
    facts = SPEC.inspect(source(tiny_model("flux2", flavour)))
    assert facts.flavour == flavour
    assert facts.details["guidance"] == (1.0 if flavour == "dev" else None)
    assert facts.schedule.model_time(torch.tensor([0.25])).tolist() == [0.25]


@pytest.mark.parametrize("tokens", [256, 1024, 4096, 4300, 4301, 6000])
def test_shift_of_a_size_equals_the_samplers(tokens: int, tiny_model: TinyModel) -> None:
    folder = tiny_model("flux2", "dev")
    rule, scheduler = (
        SPEC.inspect(source(folder)).details["resolution_shift"],
        loaded.pipeline("flux2", folder).scheduler,
    )
    scheduler.set_timesteps(sigmas=[0.25, 0.5], mu=compute_empirical_mu(tokens, 50))
    shift, plain = rule.at(tokens), torch.tensor([0.25, 0.5])
    torch.testing.assert_close(scheduler.sigmas[:2], shift * plain / (1 + (shift - 1) * plain), **TOLERANCE)


def test_latents_decode_to_the_vaes_reconstruction(tiny_model: TinyModel) -> None:
    """The statistics of the VAE's batch norm, which differ between the four places of a patch."""
    folder = tiny_model("flux2", "klein-base-4b")
    [entry] = entries(folder, SHORT)
    pipeline = loaded.pipeline(SPEC.family, folder)
    statistics = pipeline.vae.bn.running_mean.unflatten(0, (-1, PATCH * PATCH))
    assert (statistics[:, 0] != statistics[:, 1]).all()
    packed = pipeline._pack_latents(pipeline._patchify_latents(entry["latents"][None]))
    generated = pipeline(
        prompt=SHORT, num_inference_steps=1, output_type="pt", width=WIDE[0], height=WIDE[1], guidance_scale=1.0,
        callback_on_step_end=lambda *_: {"latents": packed},
    ).images  # fmt: skip
    with torch.no_grad():
        latents = pipeline.vae.encode(sample_of(image()).pixels[None]).latent_dist.mode()
        through = pipeline.vae.decode(latents).sample
    torch.testing.assert_close(generated, through.mul(0.5).add(0.5).clamp(0, 1), **TOLERANCE)


def test_batch_equals_its_single_samples(tiny_model: TinyModel) -> None:
    folder = tiny_model("flux2", "dev")
    facts, both = SPEC.inspect(source(folder)), entries(folder, SHORT, LONG, references=1)
    transformer = SPEC.load_denoiser(source(folder), facts.experts[0], CPU)
    noisy, level = torch.randn(2, 32, 4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0.2, 0.9])
    with torch.no_grad():
        together = SPEC.predict(transformer, noisy, level, batch_of(*both), facts)
        alone = [
            SPEC.predict(transformer, noisy[n : n + 1], level[n : n + 1], batch_of(both[n]), facts) for n in (0, 1)
        ]
        swapped = SPEC.predict(transformer, noisy, level, batch_of(*both[::-1]), facts)
    torch.testing.assert_close(together, torch.cat(alone), **TOLERANCE)
    assert (together - swapped).abs().max() > 1e-3


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_our_processors_equal_diffusers(dtype: torch.dtype, near: float, tiny_model: TinyModel) -> None:
    folder = tiny_model("flux2", "dev")
    placement = replace(CPU, dtype=dtype)
    ours = SPEC.load_denoiser(source(folder), SPEC.inspect(source(folder)).experts[0], placement)
    theirs = Flux2Transformer2DModel.from_pretrained(folder / "transformer", torch_dtype=dtype)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    generator, found = torch.Generator().manual_seed(0), []
    given, caption = (torch.randn(2, *size, generator=generator).to(dtype) for size in ((6, 128), (7, 96)))
    positions = [torch.randint(0, 9, (count, 4), generator=generator) for count in (6, 7)]
    for model in (ours, theirs):
        model.requires_grad_(True)
        answer = model(
            hidden_states=given, encoder_hidden_states=caption, timestep=torch.tensor([0.25, 0.5]),
            guidance=torch.ones(2), img_ids=positions[0], txt_ids=positions[1], return_dict=False,
        )[0]  # fmt: skip
        answer.float().square().sum().backward()
        found.append([answer.detach(), *(one.grad for one in model.parameters())])
    for mine, other in zip(*found, strict=True):
        assert (mine - other).float().norm() <= near * other.float().norm() + 1e-6


def test_half_precision(tiny_model: TinyModel) -> None:
    folder = tiny_model("flux2", "dev")
    check_half_precision(SPEC, folder, entries(folder, SHORT, LONG), torch.randn(2, 32, 4, 6))


def test_every_default_target_gets_a_gradient(tiny_model: TinyModel) -> None:
    folder = tiny_model("flux2", "klein-base-4b")
    facts, batch = SPEC.inspect(source(folder)), batch_of(*entries(folder, SHORT, LONG))
    transformer = SPEC.load_denoiser(source(folder), facts.experts[0], CPU)
    noisy, level = torch.randn(2, 32, 4, 6), torch.tensor([0.2, 0.9])
    check_gradients(
        SPEC, facts, transformer, lambda: SPEC.predict(transformer, noisy, level, batch, facts).square().sum()
    )
    check_targets_are_counted(SPEC)


# -- samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("references", [0, 1])
def test_samples_have_the_requested_size(references: int, tiny_model: TinyModel) -> None:
    pipeline = loaded.pipeline(SPEC.family, tiny_model("flux2", "klein-base-4b"))
    given = tuple(image(seed, REFERENCES[0]) for seed in range(references))
    request = SampleRequest(SHORT, width=WIDE[0], height=WIDE[1], steps=2, seed=3, references=given)
    [frame] = SPEC.sample(pipeline, request).frames
    assert frame.size == WIDE
    assert SPEC.sample(pipeline, request).frames[0].tobytes() == frame.tobytes()
    assert SPEC.sample(pipeline, replace(request, prompt=LONG)).frames[0].tobytes() != frame.tobytes()
    if references:
        other = replace(request, references=(image(7, REFERENCES[0]),))
        assert SPEC.sample(pipeline, other).frames[0].tobytes() != frame.tobytes()


@pytest.mark.parametrize(
    ("flavour", "guidance", "passes"),
    [("dev", 2.5, 1), ("klein-base-4b", None, 2), ("klein-base-4b", 1.0, 1), ("klein-4b", None, 1)],
)
def test_guidance_of_samples(flavour: str, guidance: float | None, passes: int, tiny_model: TinyModel) -> None:
    """dev has an input for it; klein's base weights predict twice; distilled weights ignore it."""
    pipeline = loaded.pipeline(SPEC.family, tiny_model("flux2", flavour))
    with watched(pipeline.transformer) as calls:
        SPEC.sample(pipeline, SampleRequest(SHORT, width=32, height=32, steps=1, guidance=guidance))
    assert len(calls.inputs) == passes
    given = calls.inputs[0]["guidance"]
    assert (None if given is None else given.tolist()) == ([guidance] if flavour == "dev" else None)


def test_a_negative_prompt_of_klein(tiny_model: TinyModel) -> None:
    pipeline = loaded.pipeline(SPEC.family, tiny_model("flux2", "klein-base-4b"))
    request = SampleRequest(SHORT, negative_prompt=LONG, width=32, height=32, steps=1)
    with watched(pipeline.transformer) as calls:
        SPEC.sample(pipeline, request)
    with torch.no_grad():
        expected, _ = pipeline.encode_prompt(LONG)
    torch.testing.assert_close(calls.inputs[1]["encoder_hidden_states"], expected, **TOLERANCE)
    with pytest.warns(UserWarning, match="no effect with guidance 1"):
        SPEC.sample(pipeline, replace(request, guidance=1.0))


@pytest.mark.parametrize("flavour", ["dev", "klein-4b"])
def test_an_ignored_negative_prompt_warns(flavour: str, tiny_model: TinyModel) -> None:
    pipeline = loaded.pipeline(SPEC.family, tiny_model("flux2", flavour))
    with pytest.warns(UserWarning, match="do not support negative prompts"):
        SPEC.sample(pipeline, SampleRequest(SHORT, negative_prompt=LONG, width=32, height=32, steps=1))


@pytest.mark.parametrize("size", [(48, 200), (64, 600)])
def test_references_that_the_pipeline_rejects(size: tuple[int, int], tiny_model: TinyModel) -> None:
    facts = SPEC.inspect(source(tiny_model("flux2", "dev")))
    with pytest.raises(ConfigError, match=rf"{size[0]}x{size[1]} pixels[\s\S]*at least 64 pixels"):
        SPEC.check_sample(SampleRequest(SHORT, width=32, height=32, references=(image(0, size),)), facts)


# -- captions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_captions_are_encoded_like_the_pipelines(flavour: str, tiny_model: TinyModel) -> None:
    """Short and truncated ones, whatever the other captions of the batch are."""
    folder = tiny_model("flux2", flavour)
    encoder, pipeline = SPEC.load_text_encoder(source(folder), CPU), loaded.pipeline(SPEC.family, folder)
    long = "猫" * 400
    found = encoder.encode([Prompt(SHORT), Prompt(long)])
    for text, entry in zip((SHORT, long), found, strict=True):
        with torch.no_grad():
            [theirs], _ = pipeline.encode_prompt(text)
        assert entry["prompt_embeds"].shape == (512, 96)
        torch.testing.assert_close(entry["prompt_embeds"], theirs, **TOLERANCE)
    assert encoder.truncated == {"512 tokens": (long,)}


def test_devs_tokenizer_is_read_without_its_image_processor(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Published folders name a processor, which transformers does not load without torchvision."""
    folder = copied(tiny_model("flux2", "dev"), tmp_path)
    expected = text_encoder(SPEC.family, folder).encode([Prompt(SHORT)])
    rewrite(folder / "model_index.json", tokenizer=["transformers", "PixtralProcessor"])
    (folder / "tokenizer" / "processor_config.json").write_text('{"processor_class": "PixtralProcessor"}')
    found = SPEC.load_text_encoder(source(folder), CPU).encode([Prompt(SHORT)])
    assert torch.equal(found[0]["prompt_embeds"], expected[0]["prompt_embeds"])


def test_ids(tiny_model: TinyModel) -> None:
    assert_id_tells_apart(SPEC, tiny_model("flux2", "klein-base-4b"))


# -- distilled weights ------------------------------------------------------------------------------------------------


def config(**model: object) -> RunConfig:
    return RunConfig.model_validate({"name": "r", "output_dir": "out", "datasets": [],
                                     "model": {"family": "flux2", **model}})  # fmt: skip


def test_distilled_klein_is_rejected_without_an_assistant(tiny_model: TinyModel) -> None:
    """By its name in the config, and by `is_distilled` in its files if the config names no flavour."""
    broken = [one for one in broken_rules(config(flavour="klein-4b")) if one.path == ("model", "assistant_adapter")]
    assert "distilled" in broken[0].found
    assert not [one for one in broken_rules(config(flavour="dev")) if one.path == ("model", "assistant_adapter")]
    origin = source(tiny_model("flux2", "klein-4b"))
    unnamed = config(path=str(origin.folder))
    with pytest.raises(ConfigError, match="distilled"):
        check_distilled(unnamed, SPEC, origin, facts_of(unnamed, SPEC, origin))
    named = config(path=str(origin.folder), flavour="klein-base-4b")
    warning = check_distilled(named, SPEC, origin, facts_of(named, SPEC, origin))
    assert warning is not None
    assert "those of klein-4b" in warning


def test_a_dataset_needs_no_references() -> None:
    data = {"id": "d", "path": "photos", "dataset_type": "image"}
    alone = RunConfig.model_validate({**config(flavour="dev").model_dump(), "datasets": [data]})
    assert not [one for one in broken_rules(alone) if "conditioning" in one.path]


# -- rejections -------------------------------------------------------------------------------------------------------


def test_a_folder_of_another_family(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parts of a FluxPipeline[\s\S]*Flux2KleinPipeline[\s\S]*model.family"):
        SPEC.inspect(source(tiny_model("flux", "dev")))
    folder = copied(tiny_model("flux2", "dev"), tmp_path)
    rewrite(folder / "model_index.json", _class_name="Flux2KleinKVPipeline")
    with pytest.raises(ConfigError, match="Flux2KleinKVPipeline"):
        SPEC.inspect(source(folder))
