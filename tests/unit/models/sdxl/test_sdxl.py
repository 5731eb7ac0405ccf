"""SDXL compared with diffusers' own pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import EulerDiscreteScheduler
from safetensors.torch import load_file, save_file

from gracetune.cache.encoder import Prompt
from gracetune.data.errors import DataError
from gracetune.data.refs import AppliedAugmentation, Fit
from gracetune.diffusion.schedule import Ddpm
from gracetune.errors import ConfigError
from gracetune.models.sdxl.spec import SPEC
from gracetune.models.spec import EncodeOptions, SampleRequest
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

FIT = Fit(original=(1000, 751), resized=(60, 45), left=5, top=9)


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str, str], Path]) -> Path:
    return tiny_model("sdxl", "base-1.0")


def entries(folder: Path, *captions: str) -> list[dict[str, torch.Tensor]]:
    latents = latent_encoder(SPEC.family, folder)
    texts = text_encoder(SPEC.family, folder).encode([Prompt(caption) for caption in captions])
    images = latents.encode([sample_of(image(seed), fit=FIT) for seed in range(len(captions))])
    return [{**text, **sample} for text, sample in zip(texts, images, strict=True)]


@pytest.mark.parametrize("predicts", ["epsilon", "v_prediction"])
def test_predict_equals_the_pipelines_call(predicts: str, folder: Path, tiny_v_prediction: Path) -> None:
    folder = folder if predicts == "epsilon" else tiny_v_prediction
    facts = SPEC.inspect(source(folder))
    assert facts.schedule.prediction == predicts
    pipeline = loaded.pipeline(SPEC.family, folder)
    with watched(pipeline.unet) as theirs:
        pipeline(
            [SHORT, LONG],
            width=WIDE[0],
            height=WIDE[1],
            num_inference_steps=3,
            guidance_scale=1.0,
            original_size=(751, 1000),
            crops_coords_top_left=(9, 5),
            target_size=(WIDE[1], WIDE[0]),
            output_type="latent",
        )
    batch = batch_of(*entries(folder, SHORT, LONG))
    for inputs, answer in zip(theirs.inputs, theirs.answers, strict=True):
        level = ((inputs["1"] + 1) / 1000).expand(2)
        with torch.no_grad(), watched(pipeline.unet) as ours:
            predicted = SPEC.predict(pipeline.unet, inputs["0"], level, batch, facts)
        torch.testing.assert_close(predicted, answer, **TOLERANCE)
        assert_same_inputs(ours.inputs[0], inputs)


def test_latents_decode_to_the_vaes_reconstruction(folder: Path) -> None:
    [entry] = entries(folder, SHORT)
    pipeline = loaded.pipeline(SPEC.family, folder)
    generated = pipeline(
        SHORT,
        width=WIDE[0],
        height=WIDE[1],
        num_inference_steps=1,
        output_type="pt",
        callback_on_step_end=lambda *_: {"latents": entry["latents"][None]},
    ).images
    pixels = sample_of(image()).pixels[None]
    with torch.no_grad():
        through = pipeline.vae.decode(pipeline.vae.encode(pixels).latent_dist.mode()).sample
    torch.testing.assert_close(generated, through.mul(0.5).add(0.5).clamp(0, 1), **TOLERANCE)


def test_batch_equals_its_single_samples(folder: Path) -> None:
    facts, both = SPEC.inspect(source(folder)), entries(folder, SHORT, LONG)
    unet = SPEC.load_denoiser(source(folder), facts.experts[0], CPU)
    noisy, level = torch.randn(2, 4, 4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0.2, 0.9])
    with torch.no_grad():
        together = SPEC.predict(unet, noisy, level, batch_of(*both), facts)
        alone = [SPEC.predict(unet, noisy[n : n + 1], level[n : n + 1], batch_of(both[n]), facts) for n in (0, 1)]
        swapped = SPEC.predict(unet, noisy, level, batch_of(*both[::-1]), facts)
    torch.testing.assert_close(together, torch.cat(alone), **TOLERANCE)
    assert (together - swapped).abs().max() > 1e-3


def test_half_precision(folder: Path) -> None:
    check_half_precision(SPEC, folder, entries(folder, SHORT, LONG), torch.randn(2, 4, 8, 8))


def test_every_default_target_gets_a_gradient(folder: Path) -> None:
    facts, both = SPEC.inspect(source(folder)), entries(folder, SHORT, LONG)
    unet = SPEC.load_denoiser(source(folder), facts.experts[0], CPU)
    noisy, level = torch.randn(2, 4, 8, 8), torch.tensor([0.2, 0.9])
    check_gradients(SPEC, facts, unet, lambda: SPEC.predict(unet, noisy, level, batch_of(*both), facts).square().sum())
    check_targets_are_counted(SPEC)


@pytest.mark.parametrize("guidance", [None, 1.0])
def test_samples_have_the_requested_size(guidance: float | None, folder: Path) -> None:
    pipeline = loaded.pipeline(SPEC.family, folder)
    request = SampleRequest(SHORT, width=WIDE[0], height=WIDE[1], steps=2, guidance=guidance, seed=3)
    generated, again = SPEC.sample(pipeline, request), SPEC.sample(pipeline, request)
    [frame] = generated.frames
    assert frame.size == WIDE
    assert frame.tobytes() == again.frames[0].tobytes()
    assert SPEC.sample(pipeline, replace(request, prompt=LONG)).frames[0].tobytes() != frame.tobytes()


def test_samples_use_the_given_denoiser(folder: Path) -> None:
    facts = SPEC.inspect(source(folder))
    trained = SPEC.load_denoiser(source(folder), facts.experts[0], CPU)
    pipeline = SPEC.load_pipeline(source(folder), {"unet": trained}, CPU)
    assert pipeline.unet is trained


# -- what goes into an entry ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flips", "corner"),
    [({}, (9, 5)), ({"flip_x": True}, (9, 60 - 48 - 5)), ({"flip_x": True, "flip_y": True}, (45 - 32 - 9, 7))],
)
def test_time_ids_describe_the_crop(flips: dict[str, bool], corner: tuple[int, int], folder: Path) -> None:
    encoder = SPEC.load_latent_encoder(source(folder), CPU, EncodeOptions())
    [entry] = encoder.encode([sample_of(image(), fit=FIT, augmentation=AppliedAugmentation(**flips))])
    assert entry["time_ids"].tolist() == [751, 1000, *corner, 32, 48]


def test_force_upcast_vae_encodes_in_float32_and_returns_the_requested_dtype(folder: Path, tmp_path: Path) -> None:
    half = replace(CPU, dtype=torch.bfloat16)
    exact = SPEC.load_latent_encoder(source(folder), CPU, EncodeOptions()).encode([sample_of(image())])[0]["latents"]
    [careful] = SPEC.load_latent_encoder(source(folder), half, EncodeOptions()).encode([sample_of(image())])
    assert careful["latents"].dtype == torch.bfloat16
    torch.testing.assert_close(careful["latents"], exact.bfloat16(), rtol=0, atol=0)
    careless = copied(folder, tmp_path)
    rewrite(careless / "vae" / "config.json", force_upcast=False)
    [rough] = SPEC.load_latent_encoder(source(careless), half, EncodeOptions()).encode([sample_of(image())])
    assert not torch.equal(rough["latents"], careful["latents"])


def test_a_vae_with_its_own_mean_and_deviation(folder: Path, tmp_path: Path) -> None:
    other = copied(folder, tmp_path)
    mean, std = [0.5, -1.0, 2.0, 0.0], [2.0, 1.0, 0.5, 3.0]
    rewrite(other / "vae" / "config.json", latents_mean=mean, latents_std=std)
    [plain] = SPEC.load_latent_encoder(source(folder), CPU, EncodeOptions()).encode([sample_of(image())])
    [moved] = SPEC.load_latent_encoder(source(other), CPU, EncodeOptions()).encode([sample_of(image())])
    raw = plain["latents"] / 0.13025
    expected = (raw - torch.tensor(mean)[:, None, None]) * 0.13025 / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(moved["latents"], expected, **TOLERANCE)


def test_references_are_rejected(folder: Path) -> None:
    encoder = SPEC.load_latent_encoder(source(folder), CPU, EncodeOptions())
    with pytest.raises(DataError, match="supports none"):
        encoder.encode([sample_of(image(), sample_of(image(1)))])


def test_ids(folder: Path) -> None:
    assert_id_tells_apart(SPEC, folder)


# -- the schedule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("predicts", ["epsilon", "v_prediction"])
def test_schedule_equals_the_samplers(predicts: str, folder: Path, tiny_v_prediction: Path) -> None:
    folder = folder if predicts == "epsilon" else tiny_v_prediction
    schedule = SPEC.inspect(source(folder)).schedule
    euler = EulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler")
    levels = torch.arange(1, 1000) / 1000  # the last step of a schedule without signal has no finite sigma
    a, s = schedule.coefficients(levels)
    torch.testing.assert_close(s / a, euler.sigmas.flip(0)[1:-1], rtol=1e-4, atol=0)
    assert schedule.model_time(levels).tolist() == list(range(999))


def test_zero_terminal_snr_schedule(tiny_v_prediction: Path) -> None:
    schedule = SPEC.inspect(source(tiny_v_prediction)).schedule
    assert isinstance(schedule, Ddpm)
    assert schedule.alphas_cumprod[-1] == 0.0


@pytest.mark.parametrize(
    ("marks", "predicts", "signal"),
    [([], "epsilon", True), (["v_pred"], "v_prediction", True), (["v_pred", "ztsnr"], "v_prediction", False)],
)
def test_single_file_marks_set_the_prediction(
    marks: list[str], predicts: str, signal: bool, folder: Path, tmp_path: Path
) -> None:
    save_file({name: torch.zeros(0) for name in (*marks, "other")}, tmp_path / "one.safetensors")
    single = replace(source(folder), single_file=tmp_path / "one.safetensors")
    schedule = SPEC.inspect(single).schedule
    assert isinstance(schedule, Ddpm)
    assert schedule.prediction == predicts
    assert (schedule.alphas_cumprod[-1] > 0) == signal
    unet = SPEC.build_denoiser(source(folder), SPEC.inspect(single).experts[0])
    scheduler = SPEC.load_pipeline(single, {"unet": unet}, CPU).scheduler
    assert scheduler.config.prediction_type == predicts
    assert scheduler.config.rescale_betas_zero_snr == (not signal)


def test_the_denoiser_of_a_single_file(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "unet" / "diffusion_pytorch_model.safetensors")
    save_file({name: tensor + 1.0 for name, tensor in weights.items()}, tmp_path / "one.safetensors")
    single = replace(source(folder), single_file=tmp_path / "one.safetensors")
    loaded = SPEC.load_denoiser(single, SPEC.inspect(single).experts[0], CPU).state_dict()
    assert all(torch.equal(loaded[name], tensor + 1.0) for name, tensor in weights.items())


def test_id_of_a_vae_without_force_upcast_has_its_dtype(folder: Path, tmp_path: Path) -> None:
    """Such as the fp16-fix VAE. The id is the same before and after loading."""
    changed = copied(folder, tmp_path)
    rewrite(changed / "vae" / "config.json", force_upcast=False)
    half = replace(CPU, dtype=torch.bfloat16)
    found = [
        SPEC.load_latent_encoder(source(changed), replace(half, device=torch.device(device)), EncodeOptions()).id
        for device in ("cpu", "meta")
    ]
    assert found[0] == found[1]
    assert dict(found[0].settings)["dtype"] == "torch.bfloat16, kept as torch.bfloat16"


@pytest.mark.parametrize("side", [30, 100])
def test_unsupported_size(side: int, folder: Path) -> None:
    pipeline = loaded.pipeline(SPEC.family, folder)
    with pytest.raises(ConfigError, match=rf"height\n.*{side}\n.*a multiple of 8\n.*{round(side / 8) * 8}"):
        SPEC.sample(pipeline, SampleRequest(SHORT, width=32, height=side))


# -- rejections -------------------------------------------------------------------------------------------------------


def test_a_folder_of_another_family(tiny_model: Callable[[str, str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"parts of a WanPipeline[\s\S]*StableDiffusionXLPipeline[\s\S]*model.family"):
        SPEC.inspect(source(tiny_model("wan", "t2v-1.3b-2.1")))


def test_all_missing_parts_are_named(folder: Path, tmp_path: Path) -> None:
    partial = copied(folder, tmp_path)
    (partial / "vae" / "config.json").unlink()
    (partial / "tokenizer_2").rename(tmp_path / "gone")
    with pytest.raises(ConfigError) as rejected:
        SPEC.inspect(source(partial))
    assert [problem.found for problem in rejected.value.problems] == [
        "vae without config.json",
        "no folder tokenizer_2",
    ]


@pytest.mark.parametrize(
    ("part", "changed", "named"),
    [
        ("scheduler/scheduler_config.json", {"prediction_type": "sample"}, "epsilon or v_prediction"),
        ("scheduler/scheduler_config.json", {"timestep_type": "continuous"}, "discrete"),
        ("scheduler/scheduler_config.json", {"rescale_betas_zero_snr": True}, "v_prediction"),
        ("unet/config.json", {"in_channels": 9}, "inpainting"),
    ],
)
def test_related_models_are_rejected(
    part: str, changed: dict[str, object], named: str, folder: Path, tmp_path: Path
) -> None:
    relative = copied(folder, tmp_path)
    rewrite(relative / part, **changed)
    with pytest.raises(ConfigError, match=named):
        SPEC.inspect(source(relative))


def test_samples_with_references_are_rejected(folder: Path) -> None:
    with pytest.raises(ConfigError, match="does not edit"):
        SPEC.sample(loaded.pipeline(SPEC.family, folder), SampleRequest(SHORT, references=(image(),)))


def test_guidance_rescale_changes_the_sample(folder: Path) -> None:
    pipeline = loaded.pipeline(SPEC.family, folder)
    request = SampleRequest("a cat", "a dog", 64, 64, steps=2, guidance=7.0)
    plain, rescaled = (SPEC.sample(pipeline, replace(request, guidance_rescale=value)) for value in (0.0, 0.9))
    assert plain.frames[0].tobytes() != rescaled.frames[0].tobytes()
