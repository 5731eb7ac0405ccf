"""`predict` on entries of our encoders, compared with the denoiser calls of diffusers' own pipelines."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gracetune.adapters.targets import matches_path
from gracetune.diffusion.schedule import noisy, target
from gracetune.errors import ConfigError
from gracetune.models.source import ModelSource
from gracetune.models.spec import PartPlacement, SampleRequest
from gracetune.models.wan.load import TEXT_TOKENS
from gracetune.models.wan.spec import SPEC
from unit.models import loaded
from unit.models.wan.cases import (
    CASES,
    CPU,
    Case,
    TinyModel,
    batched,
    clip,
    entries,
    image,
    pipeline_of,
    record,
    run,
    source_of,
)

CAPTION, AVOIDED = "a red cat &amp; a   dog", ""
EXACT = {"rtol": 0.0, "atol": 1e-5}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_denoiser_inputs_equal_the_pipelines(tiny_model: TinyModel, case: Case) -> None:
    source = source_of(tiny_model, case.flavour)
    pipeline, facts = pipeline_of(source, case), SPEC.inspect(source)
    calls = record(pipeline)
    run(pipeline, case, prompt=CAPTION, negative_prompt=AVOIDED, num_inference_steps=3, guidance_scale=5.0)
    batches = entries(source, case, clip(case.size, case.frames), CAPTION, AVOIDED)
    denoisers = {expert.component: SPEC.load_denoiser(source, expert, CPU) for expert in facts.experts}
    assert len(calls) == 6
    channels = pipeline.vae.config.z_dim
    for number, call in enumerate(calls):
        level = call.requested["timestep"].flatten(1).amax(1) / 1000 if case.flavour.startswith("ti2v") else None
        level = call.requested["timestep"] / 1000 if level is None else level
        expert = next(expert for expert in facts.experts if float(level) >= expert.lowest)
        assert expert.component == call.component
        batch = batches[number % 2]
        with torch.no_grad():
            answer = SPEC.predict(
                denoisers[expert.component], call.requested["hidden_states"][:, :channels], level, batch, facts
            )
        torch.testing.assert_close(answer, call.answer, **EXACT)
    assert {call.component for call in calls} == set(denoisers)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_captured_steps_get_captions_of_one_shape(tiny_model: TinyModel, case: Case) -> None:
    source = source_of(tiny_model, case.flavour)
    facts = SPEC.inspect(source)
    denoiser = SPEC.load_denoiser(source, facts.experts[0], CPU)
    assert SPEC.graph_inputs is not None
    shapes = []
    for batch in entries(source, case, clip(case.size, case.frames), CAPTION, "a longer one than the other caption is"):
        given = SPEC.graph_inputs({**batch, "prompt_attention_mask": torch.ones(1, 3), "loss_mask": torch.ones(1)})
        level = torch.full((1,), 0.95)
        with torch.no_grad():
            recorded, wanted = (SPEC.predict(denoiser, batch["latents"], level, one, facts) for one in (given, batch))
        torch.testing.assert_close(recorded, wanted, rtol=0, atol=0)
        shapes.append({name: one.shape for name, one in given.items()})
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("case", [case for case in CASES if case.from_image], ids=str)
def test_first_frame_reaches_the_denoiser_as_in_the_pipeline(tiny_model: TinyModel, case: Case) -> None:
    source = source_of(tiny_model, case.flavour)
    pipeline, facts = pipeline_of(source, case), SPEC.inspect(source)
    calls = record(pipeline)
    run(pipeline, case, prompt=CAPTION, num_inference_steps=1, guidance_scale=1.0)
    (batch,) = entries(source, case, clip(case.size, case.frames), CAPTION)
    denoiser, requested = SPEC.load_denoiser(source, facts.experts[0], CPU), {}
    denoiser.register_forward_pre_hook(lambda _module, _args, given: requested.update(given), with_kwargs=True)
    channels = pipeline.vae.config.z_dim
    # The pipeline's own noise in frame 0 of the 5B is covered by the image: anything may be there.
    states = torch.cat(
        [torch.zeros_like(batch["latents"][:, :, :1]), calls[0].requested["hidden_states"][:, :channels, 1:]], 2
    )
    if not facts.details["expand_timesteps"]:
        states = calls[0].requested["hidden_states"][:, :channels]
    SPEC.predict(denoiser, states, torch.tensor([float(calls[0].requested["timestep"].max()) / 1000]), batch, facts)
    for name in ("hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image"):
        torch.testing.assert_close(
            requested[name],
            calls[0].requested[name],
            **EXACT,
            check_dtype=False,  # the solver's times are whole numbers
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_batch_equals_its_single_samples(tiny_model: TinyModel, case: Case) -> None:
    source = source_of(tiny_model, case.flavour)
    facts = SPEC.inspect(source)
    denoiser = SPEC.load_denoiser(source, facts.experts[0], CPU)
    batches = [
        *entries(source, case, clip(case.size, case.frames, seed=1), "a dog"),
        *entries(source, case, clip(case.size, case.frames, seed=2), "a photo of a red cat in the snow"),
    ]
    both, level = batched(batches), torch.tensor([0.95, 0.91])
    states = noisy(facts.schedule, both["latents"], torch.randn(both["latents"].shape), level)
    together = SPEC.predict(denoiser, states, level, both, facts)
    for index, batch in enumerate(batches):
        alone = SPEC.predict(denoiser, states[index : index + 1], level[index : index + 1], batch, facts)
        torch.testing.assert_close(together[index : index + 1], alone, **EXACT)
    assert together.shape == states.shape
    assert not torch.allclose(together[0], together[1], atol=1e-2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_reach_every_default_target(tiny_model: TinyModel, case: Case) -> None:
    source = source_of(tiny_model, case.flavour)
    facts = SPEC.inspect(source)
    (batch,) = entries(source, case, clip(case.size, case.frames), CAPTION)
    level, noise = torch.tensor([0.95]), torch.randn(batch["latents"].shape)
    states = noisy(facts.schedule, batch["latents"], noise, level)
    for expert in facts.experts:
        denoiser = SPEC.load_denoiser(source, expert, CPU)
        linears = {path: module for path, module in denoiser.named_modules() if isinstance(module, nn.Linear)}
        chosen = {path for path in linears if any(matches_path(pattern, path) for pattern in SPEC.default_targets)}
        assert all(any(matches_path(pattern, path) for path in linears) for pattern in SPEC.default_targets)
        assert len(chosen) == (12 if facts.details["image_encoder"] else 10) * len(denoiser.get_submodule("blocks"))
        for path in chosen:
            linears[path].weight.requires_grad_()
        answer = SPEC.predict(denoiser, states, level, batch, facts)
        (answer - target(facts.schedule, batch["latents"], noise, level)).square().mean().backward()
        for path in chosen:
            gradient = linears[path].weight.grad
            assert gradient is not None, path
            assert float(gradient.abs().max()) > 0, path


def test_image_is_a_clip_of_one_frame(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model, "t2v-14b-2.2")
    facts = SPEC.inspect(source)
    (batch,) = entries(source, CASES[0], clip((48, 48), frames=1), CAPTION)
    assert batch["latents"].shape == (1, 16, 1, 6, 6)
    denoiser = SPEC.load_denoiser(source, facts.experts[0], CPU)
    answer = SPEC.predict(denoiser, batch["latents"], torch.tensor([0.9]), batch, facts)
    assert answer.shape == batch["latents"].shape
    assert bool(answer.isfinite().all())


def test_everything_follows_the_dtype_of_the_noisy_latents(tiny_model: TinyModel) -> None:
    case = CASES[1]
    source = source_of(tiny_model, case.flavour)
    facts, half = SPEC.inspect(source), PartPlacement(torch.device("cpu"), torch.bfloat16)
    (batch,) = entries(source, case, clip(case.size, case.frames), CAPTION)
    precise, states = SPEC.load_denoiser(source, facts.experts[0], CPU), torch.randn(batch["latents"].shape)
    expected = SPEC.predict(precise, states, torch.tensor([0.95]), batch, facts)
    denoiser = SPEC.load_denoiser(source, facts.experts[0], half)
    answer = SPEC.predict(denoiser, states.bfloat16(), torch.tensor([0.95]), batch, facts)
    assert answer.dtype == torch.bfloat16
    torch.testing.assert_close(answer.float(), expected, rtol=0.0, atol=0.1 * float(expected.abs().max()))


def test_the_5b_without_a_first_frame_gets_one_time_per_sample(tiny_model: TinyModel) -> None:
    case = CASES[2]
    source = source_of(tiny_model, case.flavour)
    facts = SPEC.inspect(source)
    (batch,) = entries(source, case, clip(case.size, case.frames), CAPTION)
    denoiser, requested = SPEC.load_denoiser(source, facts.experts[0], CPU), {}
    denoiser.register_forward_pre_hook(lambda _module, _args, given: requested.update(given), with_kwargs=True)
    SPEC.predict(denoiser, batch["latents"], torch.tensor([0.5]), batch, facts)
    assert requested["timestep"].tolist() == [500.0]
    assert requested["encoder_hidden_states"].shape[1] == TEXT_TOKENS


LANDSCAPE = {"width": 96, "height": 64}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_frames_have_the_requested_size(tiny_model: TinyModel, case: Case) -> None:
    pipeline = loaded.pipeline("wan", tiny_model("wan", case.flavour))
    references = (image((100, 100)),) if case.from_image else ()
    request = SampleRequest("a cat", frames=5, steps=2, seed=3, references=references, **LANDSCAPE)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # what NaN earns on its way to bytes
        generated = SPEC.sample(pipeline, request)
    assert generated.audio is None
    assert generated.fps == (24.0 if case.flavour.startswith("ti2v") else 16.0)
    assert [frame.size for frame in generated.frames] == [(96, 64)] * 5
    assert np.asarray(generated.frames[0]).std() > 0
    again = SPEC.sample(pipeline, request)
    assert all(np.array_equal(one, other) for one, other in zip(generated.frames, again.frames, strict=True))


def test_image_is_one_frame_without_a_rate(tiny_model: TinyModel) -> None:
    pipeline = loaded.pipeline("wan", tiny_model("wan", "t2v-14b-2.2"))
    generated = SPEC.sample(pipeline, SampleRequest("a cat", steps=1, **LANDSCAPE))
    assert [frame.size for frame in generated.frames] == [(96, 64)]
    assert generated.fps is None


def test_the_given_expert_is_used_and_the_other_one_loaded(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model, "t2v-14b-2.2")
    high, low = SPEC.inspect(source).experts
    trained = SPEC.load_denoiser(source, low, CPU)
    request = SampleRequest("a cat", steps=3, seed=1, **LANDSCAPE)
    before = SPEC.sample(loaded.pipeline("wan", source.folder), request)
    with torch.no_grad():
        trained.get_parameter("proj_out.weight").mul_(2)
    pipeline = SPEC.load_pipeline(source, {low.component: trained}, CPU)
    assert getattr(pipeline, low.component) is trained
    assert getattr(pipeline, high.component) is not None
    assert not np.array_equal(SPEC.sample(pipeline, request).frames[0], before.frames[0])


def test_the_image_processor_of_the_published_folder_needs_no_torchvision(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model("wan", "i2v-14b-480p-2.1"), tmp_path / "published"))
    index = json.loads((folder / "model_index.json").read_text())
    index["image_processor"] = ["transformers", "CLIPImageProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    settings = json.loads((folder / "image_processor" / "preprocessor_config.json").read_text())
    settings["image_processor_type"] = "CLIPImageProcessor"
    (folder / "image_processor" / "preprocessor_config.json").write_text(json.dumps(settings))
    pipeline = SPEC.load_pipeline(ModelSource("published", folder), {}, CPU)
    request = SampleRequest("a cat", steps=1, references=(image((64, 64)),), **LANDSCAPE)
    expected = SPEC.sample(loaded.pipeline("wan", tiny_model("wan", "i2v-14b-480p-2.1")), request)
    assert np.array_equal(SPEC.sample(pipeline, request).frames[0], expected.frames[0])


@pytest.mark.parametrize(
    ("flavour", "change", "message"),
    [
        ("t2v-14b-2.2", {"width": 90}, "width\n.*90\n.*multiple of 16\n.*96"),
        ("ti2v-5b-2.2", {"height": 80}, "height\n.*80\n.*multiple of 32\n.*64"),
        ("t2v-14b-2.2", {"frames": 8}, "num_frames\n.*8\n.*4 k \\+ 1 frames\n.*9"),
        ("t2v-14b-2.2", {"references": 1}, "references\n.*1 images\n.*none: these weights have no image-to-video mode"),
        ("i2v-14b-2.2", {}, "references\n.*none\n.*continue a first frame"),
        ("i2v-14b-2.2", {"references": 2}, "references\n.*2 images\n.*1: the first frame"),
    ],
)
def test_unsupported_requests_are_rejected(
    tiny_model: TinyModel, flavour: str, change: dict[str, int], message: str
) -> None:
    pipeline = loaded.pipeline("wan", tiny_model("wan", flavour))
    references = tuple(image((64, 64), seed) for seed in range(change.get("references", 0)))
    with pytest.raises(ConfigError, match=message):
        SPEC.sample(pipeline, SampleRequest("a cat", steps=1, **{**LANDSCAPE, **change, "references": references}))
