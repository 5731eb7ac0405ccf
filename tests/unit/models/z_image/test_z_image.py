"""Z-Image and Z-Image-Turbo compared with diffusers' own pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import ZImageTransformer2DModel

from gracetune.cache.encoder import Prompt
from gracetune.config.rules import broken_rules
from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError
from gracetune.models.fact_overrides import check_distilled, facts_of
from gracetune.models.spec import SampleRequest
from gracetune.models.z_image.spec import SPEC
from unit.models import loaded
from unit.models.image_families import (
    CPU,
    LONG,
    SHORT,
    TOLERANCE,
    WIDE,
    assert_id_tells_apart,
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

FLAVOURS = ("base", "turbo")
MULTIPLE = 32
"""Tokens of an image and of a caption are padded to a multiple of this."""
TinyModel = Callable[[str, str], Path]


def entries(folder: Path, *captions: str) -> list[dict[str, torch.Tensor]]:
    texts = text_encoder(SPEC.family, folder).encode([Prompt(caption) for caption in captions])
    images = latent_encoder(SPEC.family, folder).encode([sample_of(image(seed)) for seed in range(len(captions))])
    return [{**text, **one} for text, one in zip(texts, images, strict=True)]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_predict_equals_the_pipelines_step(flavour: str, tiny_model: TinyModel) -> None:
    """The same inputs, the same answer, and with the scheduler the same next latents: sign and time included."""
    folder = tiny_model("z_image", flavour)
    facts, pipeline = SPEC.inspect(source(folder)), loaded.pipeline(SPEC.family, folder)
    captions, after = [SHORT, LONG], []

    def note(_pipeline: object, _step: int, _time: object, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        after.append(state["latents"].clone())
        return {}

    with watched(pipeline.transformer) as theirs:
        pipeline(prompt=[*captions], num_inference_steps=3, guidance_scale=0.0, width=WIDE[0], height=WIDE[1],
                 output_type="latent", callback_on_step_end=note)  # fmt: skip
    batch, levels = batch_of(*entries(folder, *captions)), pipeline.scheduler.sigmas
    assert len({len(one) % MULTIPLE for one in theirs.inputs[0]["2"]}) == 2, "captions that are padded differently"
    for step, (inputs, answer) in enumerate(zip(theirs.inputs, theirs.answers, strict=True)):
        noisy = torch.stack(inputs["0"]).squeeze(2)
        with torch.no_grad(), watched(pipeline.transformer) as ours:
            predicted = SPEC.predict(pipeline.transformer, noisy, levels[step].expand(2), batch, facts)
        torch.testing.assert_close(predicted, -torch.stack([*answer]).squeeze(2), **TOLERANCE)
        assert torch.equal(ours.inputs[0]["t"], inputs["1"])
        assert all(map(torch.equal, ours.inputs[0]["x"], inputs["0"]))
        for mine, other in zip(ours.inputs[0]["cap_feats"], inputs["2"], strict=True):
            torch.testing.assert_close(mine, other, **TOLERANCE)
        stepped = noisy + (levels[step + 1] - levels[step]) * predicted
        torch.testing.assert_close(stepped, after[step], **TOLERANCE)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_facts_from_the_files(flavour: str, tiny_model: TinyModel) -> None:
    facts = SPEC.inspect(source(tiny_model("z_image", flavour)))
    assert (facts.flavour, facts.shift) == (flavour, {"base": 6.0, "turbo": 3.0}[flavour])
    times = facts.schedule.model_time(torch.tensor([0.0, 0.25, 1.0]))
    assert times.tolist() == [1.0, 0.75, 0.0]


def test_latents_decode_to_the_vaes_reconstruction(tiny_model: TinyModel) -> None:
    folder = tiny_model("z_image", "base")
    [entry] = entries(folder, SHORT)
    pipeline = loaded.pipeline(SPEC.family, folder)
    generated = pipeline(
        prompt=SHORT, num_inference_steps=2, output_type="pt", width=WIDE[0], height=WIDE[1], guidance_scale=0.0,
        callback_on_step_end=lambda *_: {"latents": entry["latents"][None]},
    ).images  # fmt: skip
    with torch.no_grad():
        latents = pipeline.vae.encode(sample_of(image()).pixels[None]).latent_dist.mode()
        through = pipeline.vae.decode(latents).sample
    torch.testing.assert_close(generated, through.mul(0.5).add(0.5).clamp(0, 1), **TOLERANCE)


def test_batch_equals_its_single_samples(tiny_model: TinyModel) -> None:
    folder = tiny_model("z_image", "base")
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


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_real_rotations_equal_diffusers_complex_ones(dtype: torch.dtype, near: float, tiny_model: TinyModel) -> None:
    folder = tiny_model("z_image", "base")
    placement = replace(CPU, dtype=dtype)
    ours = SPEC.load_denoiser(source(folder), SPEC.inspect(source(folder)).experts[0], placement)
    theirs = ZImageTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=dtype)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    generator, found = torch.Generator().manual_seed(0), []
    given = [torch.randn(16, 1, 4, 6, generator=generator) for _ in "ab"]
    captions = [torch.randn(length, 32, generator=generator) for length in (7, 40)]
    for model in (ours, theirs):
        model.requires_grad_(True)
        answer = model(
            x=[one.to(dtype) for one in given], t=torch.tensor([0.2, 0.7]),
            cap_feats=[one.to(dtype) for one in captions], return_dict=False,
        )[0]  # fmt: skip
        torch.stack(answer).float().square().sum().backward()
        found.append([torch.stack(answer).detach(), *(one.grad for one in model.parameters())])
    for mine, other in zip(*found, strict=True):
        assert (mine - other).float().norm() <= near * other.float().norm() + 1e-6


def test_half_precision(tiny_model: TinyModel) -> None:
    folder = tiny_model("z_image", "base")
    check_half_precision(SPEC, folder, entries(folder, SHORT, LONG), torch.randn(2, 16, 4, 6))


def test_every_default_target_gets_a_gradient(tiny_model: TinyModel) -> None:
    folder = tiny_model("z_image", "base")
    facts, batch = SPEC.inspect(source(folder)), batch_of(*entries(folder, SHORT, LONG))
    transformer = SPEC.load_denoiser(source(folder), facts.experts[0], CPU)
    noisy, level = torch.randn(2, 16, 4, 6), torch.tensor([0.2, 0.9])
    check_gradients(
        SPEC, facts, transformer, lambda: SPEC.predict(transformer, noisy, level, batch, facts).square().sum()
    )
    check_targets_are_counted(SPEC)


def test_samples_have_the_requested_size(tiny_model: TinyModel) -> None:
    pipeline = loaded.pipeline(SPEC.family, tiny_model("z_image", "base"))
    request = SampleRequest(SHORT, width=WIDE[0], height=WIDE[1], steps=2, seed=3)
    [frame] = SPEC.sample(pipeline, request).frames
    assert frame.size == WIDE
    assert SPEC.sample(pipeline, request).frames[0].tobytes() == frame.tobytes()
    assert SPEC.sample(pipeline, replace(request, prompt=LONG)).frames[0].tobytes() != frame.tobytes()


@pytest.mark.parametrize(
    ("flavour", "guidance", "passes"),
    [("base", None, 2), ("base", 4.0, 2), ("base", 1.0, 1), ("turbo", None, 1), ("turbo", 2.0, 2)],
)
def test_guidance_of_samples(flavour: str, guidance: float | None, passes: int, tiny_model: TinyModel) -> None:
    """1 means none. The pipeline's own value is 1 lower, and Turbo is not guided by default."""
    pipeline = loaded.pipeline(SPEC.family, tiny_model("z_image", flavour))
    with watched(pipeline.transformer) as calls:
        SPEC.sample(pipeline, SampleRequest(SHORT, width=32, height=32, steps=1, guidance=guidance))
    assert [len(inputs["0"]) for inputs in calls.inputs] == [passes]
    assert pipeline.guidance_scale == (5.0 if (flavour, guidance) == ("base", None) else max(0, (guidance or 1) - 1))


def test_a_negative_prompt_without_guidance(tiny_model: TinyModel) -> None:
    pipeline = loaded.pipeline(SPEC.family, tiny_model("z_image", "turbo"))
    request = SampleRequest(SHORT, negative_prompt="blurred", width=32, height=32, steps=1)
    with pytest.warns(UserWarning, match="no effect with guidance 1"):
        SPEC.sample(pipeline, request)


# -- captions ---------------------------------------------------------------------------------------------------------


def test_long_captions_are_truncated_like_the_pipelines(tiny_model: TinyModel) -> None:
    folder = tiny_model("z_image", "base")
    encoder, pipeline = SPEC.load_text_encoder(source(folder), CPU), loaded.pipeline(SPEC.family, folder)
    long = "猫" * 400
    [entry] = encoder.encode([Prompt(long)])
    with torch.no_grad():
        [theirs], _ = pipeline.encode_prompt([long], do_classifier_free_guidance=False)
    assert len(entry["prompt_embeds"]) == 512
    torch.testing.assert_close(entry["prompt_embeds"], theirs, **TOLERANCE)
    assert encoder.truncated == {"512 tokens": (long,)}


def test_ids(tiny_model: TinyModel) -> None:
    assert_id_tells_apart(SPEC, tiny_model("z_image", "base"))


# -- Turbo ------------------------------------------------------------------------------------------------------------


def config(**model: object) -> RunConfig:
    return RunConfig.model_validate({"name": "r", "output_dir": "out", "datasets": [],
                                     "model": {"family": "z_image", **model}})  # fmt: skip


def test_turbo_is_rejected_without_an_assistant(tiny_model: TinyModel) -> None:
    """By its name in the config, and by its files if the config names no flavour."""
    broken = [one for one in broken_rules(config(flavour="turbo")) if one.path == ("model", "assistant_adapter")]
    assert "distilled" in broken[0].found
    assert not [one for one in broken_rules(config(flavour="base")) if one.path == ("model", "assistant_adapter")]
    origin = source(tiny_model("z_image", "turbo"))
    unnamed = config(path=str(origin.folder))
    with pytest.raises(ConfigError, match=r"distilled[\s\S]*model.flavour=base"):
        check_distilled(unnamed, SPEC, origin, facts_of(unnamed, SPEC, origin))
    assisted = config(path=str(origin.folder), assistant_adapter="a.safetensors")
    assert check_distilled(assisted, SPEC, origin, facts_of(assisted, SPEC, origin)) is None


def test_a_full_finetune_of_turbo_is_rejected() -> None:
    full = config(flavour="turbo").model_copy(update={"adapter": config().adapter.model_copy(
        update={"kind": "full_finetune"})})  # fmt: skip
    [broken] = [one for one in broken_rules(full) if one.path == ("adapter", "kind")]
    assert "the weights of base" in broken.hint


def test_turbos_files_under_another_name_are_trained_with_a_warning(tiny_model: TinyModel) -> None:
    origin = source(tiny_model("z_image", "turbo"))
    named = config(path=str(origin.folder), flavour="base")
    warning = check_distilled(named, SPEC, origin, facts_of(named, SPEC, origin))
    assert warning is not None
    assert "those of turbo" in warning


# -- rejections -------------------------------------------------------------------------------------------------------


def test_a_folder_of_another_family(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parts of a FluxPipeline[\s\S]*ZImagePipeline[\s\S]*model.family"):
        SPEC.inspect(source(tiny_model("flux", "dev")))
    folder = copied(tiny_model("z_image", "base"), tmp_path)
    rewrite(folder / "model_index.json", _class_name="ZImageOmniPipeline")
    with pytest.raises(ConfigError, match="ZImageOmniPipeline"):
        SPEC.inspect(source(folder))
