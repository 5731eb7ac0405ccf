"""Qwen-Image and its edit flavours compared with diffusers' own pipelines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit

from gracetune.cache.encoder import Prompt
from gracetune.data.errors import DataError
from gracetune.data.media.load import Sample
from gracetune.errors import ConfigError
from gracetune.models.qwen_image.spec import SPEC
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

FLAVOURS = ("t2i", "edit", "edit-2509", "edit-2511")
EDITS = FLAVOURS[1:]
AREA = 64 * 64
REFERENCES = ((96, 32), (64, 64))
"""Sizes the pipelines do not resize if references have `AREA` pixels."""
SCALE = 8


@pytest.fixture(autouse=True)
def small_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """The edit pipelines enlarge every reference to a megapixel."""
    real = edit.calculate_dimensions
    monkeypatch.setattr(edit, "calculate_dimensions", lambda area, ratio: real(AREA, ratio))
    plus = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus"
    monkeypatch.setattr(f"{plus}.VAE_IMAGE_SIZE", AREA)
    monkeypatch.setattr(f"{plus}.CONDITION_IMAGE_SIZE", 2 * AREA)


def reference_count(flavour: str) -> int:
    return {"t2i": 0, "edit": 1}.get(flavour, 2)


def references(flavour: str, seed: int) -> list[Sample]:
    sizes = REFERENCES[: reference_count(flavour)]
    return [sample_of(image(10 * (place + 1) + seed, size)) for place, size in enumerate(sizes)]


def entries(folder: Path, flavour: str, *captions: str) -> list[dict[str, torch.Tensor]]:
    given = [references(flavour, seed) for seed in range(len(captions))]
    prompts = [Prompt(caption, tuple(seen)) for caption, seen in zip(captions, given, strict=True)]
    texts = text_encoder(SPEC.family, folder).encode(prompts)
    samples = [sample_of(image(seed), *seen) for seed, seen in enumerate(given)]
    images = latent_encoder(SPEC.family, folder).encode(samples)
    return [{**text, **sample} for text, sample in zip(texts, images, strict=True)]


def arguments(flavour: str, seed: int = 0) -> dict[str, Any]:
    given: dict[str, Any] = {"width": WIDE[0], "height": WIDE[1], "true_cfg_scale": 1.0}
    sizes = REFERENCES[: reference_count(flavour)]
    images = [image(10 * (place + 1) + seed, size) for place, size in enumerate(sizes)]
    if flavour == "t2i":
        return given
    return {**given, "image": images[0] if flavour == "edit" else images}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_predict_equals_the_pipelines_call(flavour: str, tiny_model: Callable[[str, str], Path]) -> None:
    folder = tiny_model("qwen_image", flavour)
    facts = SPEC.inspect(source(folder))
    pipeline = loaded.pipeline(SPEC.family, folder)
    # Only the first pipeline takes several captions at once whose images differ.
    captions = [SHORT, LONG] if flavour == "t2i" else [LONG]
    with watched(pipeline.transformer) as theirs:
        pipeline(prompt=captions, num_inference_steps=3, output_type="latent", **arguments(flavour))
    batch, tokens = batch_of(*entries(folder, flavour, *captions)), WIDE[0] * WIDE[1] // (2 * SCALE) ** 2
    for inputs, answer in zip(theirs.inputs, theirs.answers, strict=True):
        noisy, expected = (
            QwenImagePipeline._unpack_latents(part[:, :tokens], WIDE[1], WIDE[0], SCALE)[:, :, 0]
            for part in (inputs["hidden_states"], answer)
        )
        with torch.no_grad(), watched(pipeline.transformer) as ours:
            predicted = SPEC.predict(pipeline.transformer, noisy, inputs["timestep"], batch, facts)
        torch.testing.assert_close(predicted, expected, **TOLERANCE)
        assert_same_inputs(ours.inputs[0], inputs)
        assert ours.inputs[0]["img_shapes"] == inputs["img_shapes"]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_facts_from_the_files(flavour: str, tiny_model: Callable[[str, str], Path]) -> None:
    facts = SPEC.inspect(source(tiny_model("qwen_image", flavour)))
    assert facts.flavour == flavour
    assert facts.shift == pytest.approx(2.0008, abs=1e-3)
    assert facts.details["resolution_shift"].max_tokens == 8192


@pytest.mark.parametrize(
    "flavour",
    [
        "t2i",
        pytest.param("edit", marks=pytest.mark.full),
        pytest.param("edit-2509", marks=pytest.mark.full),
        pytest.param("edit-2511", marks=pytest.mark.full),
    ],
)
def test_latents_decode_to_the_vaes_reconstruction(flavour: str, tiny_model: Callable[[str, str], Path]) -> None:
    folder = tiny_model("qwen_image", flavour)
    [entry] = entries(folder, flavour, SHORT)
    pipeline = loaded.pipeline(SPEC.family, folder)
    packed = QwenImagePipeline._pack_latents(entry["latents"][None], 1, 16, WIDE[1] // SCALE, WIDE[0] // SCALE)
    generated = pipeline(
        prompt=SHORT,
        num_inference_steps=2,
        output_type="pt",
        callback_on_step_end=lambda *_: {"latents": packed},
        **arguments(flavour),
    ).images
    with torch.no_grad():
        latents = pipeline.vae.encode(sample_of(image()).pixels[None, :, None]).latent_dist.mode()
        through = pipeline.vae.decode(latents).sample[:, :, 0]
    torch.testing.assert_close(generated, through.mul(0.5).add(0.5).clamp(0, 1), **TOLERANCE)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_batch_equals_its_single_samples(flavour: str, tiny_model: Callable[[str, str], Path]) -> None:
    """Also for Edit Plus: its pipeline supports one sample at a time, its transformer several."""
    folder = tiny_model("qwen_image", flavour)
    facts, both = SPEC.inspect(source(folder)), entries(folder, flavour, SHORT, LONG)
    assert len(both[0]["prompt_embeds"]) != len(both[1]["prompt_embeds"])
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


def test_captions_of_equal_length_are_not_masked(tiny_model: Callable[[str, str], Path]) -> None:
    folder = tiny_model("qwen_image", "t2i")
    facts, [entry, longer] = SPEC.inspect(source(folder)), entries(folder, "t2i", SHORT, LONG)
    transformer, noisy = SPEC.load_denoiser(source(folder), facts.experts[0], CPU), torch.randn(2, 16, 4, 6)
    masks = []
    for both in ([entry, entry], [entry, longer]):
        with torch.no_grad(), watched(transformer) as calls:
            SPEC.predict(transformer, noisy, torch.tensor([0.5, 0.5]), batch_of(*both), facts)
        masks.append(calls.inputs[0]["encoder_hidden_states_mask"])
    assert masks[0] is None
    assert masks[1].sum(dim=1).tolist() == [len(entry["prompt_embeds"]), len(longer["prompt_embeds"])]


@pytest.mark.parametrize(
    "flavour",
    [
        pytest.param("t2i", marks=pytest.mark.full),
        pytest.param("edit", marks=pytest.mark.full),
        pytest.param("edit-2509", marks=pytest.mark.full),
        "edit-2511",
    ],
)
def test_half_precision(flavour: str, tiny_model: Callable[[str, str], Path]) -> None:
    folder = tiny_model("qwen_image", flavour)
    check_half_precision(SPEC, folder, entries(folder, flavour, SHORT, LONG), torch.randn(2, 16, 4, 6))


@pytest.mark.parametrize(
    "flavour",
    [
        "t2i",
        pytest.param("edit", marks=pytest.mark.full),
        pytest.param("edit-2509", marks=pytest.mark.full),
        "edit-2511",
    ],
)
def test_every_default_target_gets_a_gradient(flavour: str, tiny_model: Callable[[str, str], Path]) -> None:
    folder = tiny_model("qwen_image", flavour)
    facts, both = SPEC.inspect(source(folder)), entries(folder, flavour, SHORT, LONG)
    transformer = SPEC.load_denoiser(source(folder), facts.experts[0], CPU)
    noisy, level = torch.randn(2, 16, 4, 6), torch.tensor([0.2, 0.9])
    check_gradients(
        SPEC, facts, transformer, lambda: SPEC.predict(transformer, noisy, level, batch_of(*both), facts).square().sum()
    )
    check_targets_are_counted(SPEC)


@pytest.mark.parametrize(
    "flavour",
    [
        "t2i",
        pytest.param("edit", marks=pytest.mark.full),
        "edit-2509",
        pytest.param("edit-2511", marks=pytest.mark.full),
    ],
)
def test_samples_have_the_requested_size(flavour: str, tiny_model: Callable[[str, str], Path]) -> None:
    pipeline = loaded.pipeline(SPEC.family, tiny_model("qwen_image", flavour))
    images = tuple(image(20 + place, size) for place, size in enumerate(REFERENCES[: reference_count(flavour)]))
    request = SampleRequest(SHORT, width=WIDE[0], height=WIDE[1], steps=2, seed=3, references=images)
    [frame] = SPEC.sample(pipeline, request).frames
    assert frame.size == WIDE
    assert SPEC.sample(pipeline, request).frames[0].tobytes() == frame.tobytes()
    assert SPEC.sample(pipeline, replace(request, prompt=LONG)).frames[0].tobytes() != frame.tobytes()
    if images:
        other = replace(request, references=(*images[:-1], image(30, images[-1].size)))
        assert SPEC.sample(pipeline, other).frames[0].tobytes() != frame.tobytes()


def test_samples_use_guidance_by_default(tiny_model: Callable[[str, str], Path]) -> None:
    pipeline = loaded.pipeline(SPEC.family, tiny_model("qwen_image", "t2i"))
    requested = {}
    for guidance in (None, 1.0):
        with watched(pipeline.transformer) as calls:
            SPEC.sample(pipeline, SampleRequest(SHORT, width=32, height=32, steps=2, guidance=guidance))
        requested[guidance] = len(calls.inputs)
    assert requested == {None: 4, 1.0: 2}


# -- captions and references ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_caption_embedding_depends_on_text_and_references(flavour: str, tiny_model: Callable[[str, str], Path]) -> None:
    encoder = text_encoder(SPEC.family, tiny_model("qwen_image", flavour))
    assert encoder.reads_images == (flavour != "t2i")
    images = [tuple(references(flavour, seed)) for seed in (0, 1)]
    one, again, other, words = encoder.encode(
        [Prompt(SHORT, images[0]), Prompt(SHORT, images[0]), Prompt(SHORT, images[1]), Prompt(LONG, images[0])]
    )
    assert torch.equal(one["prompt_embeds"], again["prompt_embeds"])
    assert torch.equal(one["prompt_embeds"], other["prompt_embeds"]) == (flavour == "t2i")
    assert len(words["prompt_embeds"]) > len(one["prompt_embeds"])
    assert [*one] == ["prompt_embeds"]


def test_captions_are_truncated_like_the_pipelines(tiny_model: Callable[[str, str], Path]) -> None:
    encoder = text_encoder(SPEC.family, tiny_model("qwen_image", "t2i"))
    [entry] = encoder.encode([Prompt("猫" * 400)])
    assert len(entry["prompt_embeds"]) == 512


def test_edit_without_references(tiny_model: Callable[[str, str], Path]) -> None:
    """Edit's template has exactly one; Edit Plus adapts its template to their number."""
    with pytest.raises(DataError, match="exactly one"):
        text_encoder(SPEC.family, tiny_model("qwen_image", "edit")).encode([Prompt(SHORT)])
    with pytest.raises(DataError, match="exactly one"):
        text_encoder(SPEC.family, tiny_model("qwen_image", "edit")).encode(
            [Prompt(SHORT, tuple(references("edit-2509", 0)))]
        )
    plus = text_encoder(SPEC.family, tiny_model("qwen_image", "edit-2509"))
    bare, seen = plus.encode([Prompt(SHORT), Prompt(SHORT, tuple(references("edit-2509", 0)))])
    assert len(bare["prompt_embeds"]) < len(seen["prompt_embeds"])


def test_no_references_for_a_model_that_does_not_edit(tiny_model: Callable[[str, str], Path]) -> None:
    encoder = latent_encoder(SPEC.family, tiny_model("qwen_image", "t2i"))
    with pytest.raises(DataError, match="supports none"):
        encoder.encode([sample_of(image(), sample_of(image(1)))])


@pytest.mark.parametrize("flavour", ["t2i", "edit-2509"])
def test_ids(flavour: str, tiny_model: Callable[[str, str], Path]) -> None:
    assert_id_tells_apart(SPEC, tiny_model("qwen_image", flavour))


def test_ids_depend_on_the_template(tiny_model: Callable[[str, str], Path]) -> None:
    """All flavours share a text encoder but use different templates and image sizes."""
    ids = {text_encoder(SPEC.family, tiny_model("qwen_image", flavour)).id for flavour in FLAVOURS[:3]}
    assert len({one.weights for one in ids}) == 1
    assert len({dict(one.settings)["template"] for one in ids}) == 3


def test_references_are_resized_like_the_pipelines(
    tiny_model: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    small, areas = edit.calculate_dimensions, []
    monkeypatch.setattr(edit, "calculate_dimensions", lambda area, ratio: areas.append(area) or small(area, ratio))
    folder = tiny_model("qwen_image", "edit")
    pipeline = loaded.pipeline(SPEC.family, folder)
    pipeline(prompt=SHORT, num_inference_steps=2, output_type="latent", **arguments("edit"))
    assert areas
    theirs = {*areas}
    areas.clear()
    encoder = SPEC.load_text_encoder(source(folder), CPU)
    encoder.encode([Prompt(SHORT, tuple(references("edit", 0)))])
    assert {*areas} == theirs
    assert dict(encoder.id.settings)["picture"] == str(*theirs)


# -- rejections -------------------------------------------------------------------------------------------------------


def test_a_folder_of_another_family(tiny_model: Callable[[str, str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"parts of a FluxPipeline[\s\S]*QwenImagePipeline[\s\S]*model.family"):
        SPEC.inspect(source(tiny_model("flux", "dev")))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_all_missing_parts_are_named(flavour: str, tiny_model: Callable[[str, str], Path], tmp_path: Path) -> None:
    folder = copied(tiny_model("qwen_image", flavour), tmp_path)
    (folder / "vae").rename(tmp_path / "gone")
    if flavour in EDITS:
        (folder / "processor").rename(tmp_path / "gone too")
    with pytest.raises(ConfigError) as rejected:
        SPEC.inspect(source(folder))
    missing = ["no folder vae", *(["no folder processor"] if flavour in EDITS else [])]
    assert [problem.found for problem in rejected.value.problems] == missing


def test_a_transformer_of_another_model(tiny_model: Callable[[str, str], Path], tmp_path: Path) -> None:
    folder = copied(tiny_model("qwen_image", "t2i"), tmp_path)
    rewrite(folder / "transformer" / "config.json", _class_name="FluxTransformer2DModel")
    with pytest.raises(ConfigError, match="FluxTransformer2DModel"):
        SPEC.inspect(source(folder))


@pytest.mark.parametrize(
    ("flavour", "count", "named"),
    [("t2i", 1, "does not edit"), ("edit", 0, "to edit"), ("edit", 2, "at most 1"), ("edit-2509", 0, "to edit")],
)
def test_a_sample_with_the_wrong_number_of_references(
    flavour: str, count: int, named: str, tiny_model: Callable[[str, str], Path]
) -> None:
    pipeline = loaded.pipeline(SPEC.family, tiny_model("qwen_image", flavour))
    with pytest.raises(ConfigError, match=named):
        SPEC.sample(pipeline, SampleRequest(SHORT, references=(image(),) * count))


def test_single_step_is_rejected(tiny_model: Callable[[str, str], Path]) -> None:
    pipeline = loaded.pipeline(SPEC.family, tiny_model("qwen_image", "t2i"))
    with pytest.raises(ConfigError, match="2 or more"):
        SPEC.sample(pipeline, SampleRequest(SHORT, width=32, height=32, steps=1))
