"""Krea 2 Raw and Turbo compared with diffusers' own pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import Krea2Pipeline, Krea2Transformer2DModel
from safetensors.torch import save_file

from gracetune.adapters.adapter_files import save
from gracetune.adapters.merge import merge_module
from gracetune.cache.encoder import Prompt
from gracetune.config.rules import broken_rules
from gracetune.config.run_config import Model, RunConfig
from gracetune.errors import ConfigError
from gracetune.models.common.latent_packing import pack, unpack
from gracetune.models.fact_overrides import check_distilled, facts_of
from gracetune.models.krea2.spec import SPEC
from gracetune.models.source import open_source
from gracetune.models.spec import SampleRequest
from unit.adapters.formats import making
from unit.adapters.formats.predicting import predict
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

FLAVOURS = ("raw", "turbo")
TinyModel = Callable[[str, str], Path]


def entries(folder: Path, *captions: str) -> list[dict[str, torch.Tensor]]:
    texts = text_encoder(SPEC.family, folder).encode([Prompt(caption) for caption in captions])
    images = latent_encoder(SPEC.family, folder).encode([sample_of(image(seed)) for seed in range(len(captions))])
    return [{**text, **one} for text, one in zip(texts, images, strict=True)]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_predict_equals_the_pipelines_step(flavour: str, tiny_model: TinyModel) -> None:
    """The pipeline pads all captions to 512 tokens and masks the padding; a batch is padded to its longest caption."""
    folder = tiny_model("krea2", flavour)
    facts, pipeline = SPEC.inspect(source(folder)), loaded.pipeline(SPEC.family, folder)
    captions, after = [SHORT, LONG], []

    def note(_pipeline: object, _step: int, _time: object, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        after.append(state["latents"].clone())
        return {}

    with watched(pipeline.transformer) as theirs:
        pipeline(prompt=[*captions], num_inference_steps=3, guidance_scale=0.0, width=WIDE[0], height=WIDE[1],
                 output_type="latent", callback_on_step_end=note)  # fmt: skip
    batch, levels = batch_of(*entries(folder, *captions)), pipeline.scheduler.sigmas
    high, wide = batch["latents"].shape[-2:]
    for step, (inputs, answer) in enumerate(zip(theirs.inputs, theirs.answers, strict=True)):
        noisy = unpack(inputs["hidden_states"], high, wide)
        with torch.no_grad(), watched(pipeline.transformer) as ours:
            predicted = SPEC.predict(pipeline.transformer, noisy, levels[step].expand(2), batch, facts)
        [mine] = ours.inputs
        torch.testing.assert_close(predicted, unpack(answer, high, wide), **TOLERANCE)
        assert torch.equal(mine["hidden_states"], inputs["hidden_states"])
        torch.testing.assert_close(mine["timestep"], inputs["timestep"])
        tokens = high * wide // 4
        assert torch.equal(mine["position_ids"][-tokens:], inputs["position_ids"][-tokens:])
        assert not mine["position_ids"][:-tokens].any()
        seen, visible = mine["encoder_attention_mask"], inputs["encoder_attention_mask"]
        assert seen.sum(dim=1).tolist() == visible.sum(dim=1).tolist()
        torch.testing.assert_close(
            mine["encoder_hidden_states"][seen], inputs["encoder_hidden_states"][visible], **TOLERANCE
        )
        stepped = noisy + (levels[step + 1] - levels[step]) * predicted
        torch.testing.assert_close(pack(stepped), after[step], **TOLERANCE)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_facts_and_the_pipelines_shift(flavour: str, tiny_model: TinyModel) -> None:
    """Turbo is sampled with one shift, Raw with one that grows with the image."""
    folder = tiny_model("krea2", flavour)
    facts, pipeline = SPEC.inspect(source(folder)), loaded.pipeline(SPEC.family, folder)
    assert facts.flavour == flavour
    SPEC.sample(pipeline, SampleRequest(SHORT, width=64, height=64, steps=2, guidance=1.0))
    rule = facts.details["resolution_shift"]
    shift = facts.shift if rule is None else rule.at(16)
    assert (rule is None) == (flavour == "turbo")
    assert pipeline.scheduler.sigmas[1].item() == pytest.approx(shift * 0.5 / (1 + (shift - 1) * 0.5), rel=1e-5)
    if rule is not None:
        assert (math.log(rule.at(256)), math.log(rule.at(6400))) == pytest.approx((0.5, 1.15))


def test_latents_decode_to_the_vaes_reconstruction(tiny_model: TinyModel) -> None:
    folder = tiny_model("krea2", "raw")
    [entry] = entries(folder, SHORT)
    pipeline = loaded.pipeline(SPEC.family, folder)
    generated = pipeline(
        prompt=SHORT, num_inference_steps=2, output_type="pt", width=WIDE[0], height=WIDE[1], guidance_scale=0.0,
        callback_on_step_end=lambda *_: {"latents": pack(entry["latents"][None])},
    ).images  # fmt: skip
    with torch.no_grad():
        latents = pipeline.vae.encode(sample_of(image()).pixels[None, :, None]).latent_dist.mode()
        through = pipeline.vae.decode(latents).sample[:, :, 0]
    torch.testing.assert_close(generated, through.mul(0.5).add(0.5).clamp(0, 1), **TOLERANCE)


def test_batch_equals_its_single_samples(tiny_model: TinyModel) -> None:
    folder = tiny_model("krea2", "raw")
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
def test_rotated_pairs_equal_diffusers_halves(dtype: torch.dtype, near: float, tiny_model: TinyModel) -> None:
    folder = tiny_model("krea2", "raw")
    ours = SPEC.load_denoiser(source(folder), SPEC.inspect(source(folder)).experts[0], replace(CPU, dtype=dtype))
    theirs = Krea2Transformer2DModel.from_pretrained(folder / "transformer", torch_dtype=dtype)
    assert {name: one.dtype for name, one in ours.state_dict().items()} == {
        name: one.dtype for name, one in theirs.state_dict().items()
    }
    generator, found = torch.Generator().manual_seed(0), []
    image_tokens, caption = (torch.randn(2, *shape, generator=generator) for shape in ((6, 64), (5, 2, 32)))
    for model in (ours, theirs):
        model.requires_grad_(True)
        answer = model(
            hidden_states=image_tokens.to(dtype), encoder_hidden_states=caption.to(dtype),
            timestep=torch.tensor([0.2, 0.7]), position_ids=torch.arange(33.0).reshape(11, 3),
            encoder_attention_mask=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]), return_dict=False,
        )[0]  # fmt: skip
        answer.float().square().sum().backward()
        found.append([answer.detach(), *(one.grad for one in model.parameters())])
    for mine, other in zip(*found, strict=True):
        assert (mine - other).float().norm() <= near * other.float().norm() + 1e-6


def test_half_precision(tiny_model: TinyModel) -> None:
    folder = tiny_model("krea2", "raw")
    check_half_precision(SPEC, folder, entries(folder, SHORT, LONG), torch.randn(2, 16, 4, 6))


def test_every_default_target_gets_a_gradient(tiny_model: TinyModel) -> None:
    folder = tiny_model("krea2", "raw")
    facts, batch = SPEC.inspect(source(folder)), batch_of(*entries(folder, SHORT, LONG))
    transformer = SPEC.load_denoiser(source(folder), facts.experts[0], CPU)
    noisy, level = torch.randn(2, 16, 4, 6), torch.tensor([0.2, 0.9])
    check_gradients(
        SPEC, facts, transformer, lambda: SPEC.predict(transformer, noisy, level, batch, facts).square().sum()
    )
    check_targets_are_counted(SPEC)


def test_samples_have_the_requested_size(tiny_model: TinyModel) -> None:
    pipeline = loaded.pipeline(SPEC.family, tiny_model("krea2", "raw"))
    request = SampleRequest(SHORT, width=WIDE[0], height=WIDE[1], steps=2, seed=3)
    [frame] = SPEC.sample(pipeline, request).frames
    assert frame.size == WIDE
    assert SPEC.sample(pipeline, request).frames[0].tobytes() == frame.tobytes()
    assert SPEC.sample(pipeline, replace(request, prompt=LONG)).frames[0].tobytes() != frame.tobytes()


@pytest.mark.parametrize(
    ("flavour", "guidance", "passes"),
    [("raw", None, 2), ("raw", 4.0, 2), ("raw", 1.0, 1), ("turbo", None, 1), ("turbo", 2.0, 2)],
)
def test_guidance_of_samples(flavour: str, guidance: float | None, passes: int, tiny_model: TinyModel) -> None:
    """1 means none. The pipeline's own value is 1 lower, and Turbo is not guided by default."""
    pipeline = loaded.pipeline(SPEC.family, tiny_model("krea2", flavour))
    with watched(pipeline.transformer) as calls:
        SPEC.sample(pipeline, SampleRequest(SHORT, width=32, height=32, steps=1, guidance=guidance))
    assert len(calls.inputs) == passes
    assert pipeline.guidance_scale == (4.5 if (flavour, guidance) == ("raw", None) else max(0, (guidance or 1) - 1))


def test_a_negative_prompt_without_guidance(tiny_model: TinyModel) -> None:
    pipeline = loaded.pipeline(SPEC.family, tiny_model("krea2", "turbo"))
    request = SampleRequest(SHORT, negative_prompt="blurred", width=32, height=32, steps=1)
    with pytest.warns(UserWarning, match="no effect with guidance 1"):
        SPEC.sample(pipeline, request)


# -- captions ---------------------------------------------------------------------------------------------------------


def test_captions_are_encoded_and_truncated_like_the_pipelines(tiny_model: TinyModel) -> None:
    folder = tiny_model("krea2", "raw")
    encoder, pipeline = SPEC.load_text_encoder(source(folder), CPU), loaded.pipeline(SPEC.family, folder)
    long, longest = "猫" * 400, "x" * 507
    texts = [SHORT, long, LONG, longest, ""]
    found = encoder.encode([Prompt(text) for text in texts])
    with torch.no_grad():
        theirs, masks = pipeline.encode_prompt(texts)
    for entry, states, mask in zip(found, theirs, masks, strict=True):
        torch.testing.assert_close(entry["prompt_embeds"], states[mask], **TOLERANCE)
    assert [len(entry["prompt_embeds"]) for entry in found[1::2]] == [512, 512]
    assert encoder.truncated == {"512 tokens": (long,)}


def test_ids(tiny_model: TinyModel) -> None:
    assert_id_tells_apart(SPEC, tiny_model("krea2", "raw"))


# -- Turbo ------------------------------------------------------------------------------------------------------------


def config(**model: object) -> RunConfig:
    return RunConfig.model_validate({"name": "r", "output_dir": "out", "datasets": [],
                                     "model": {"family": "krea2", **model}})  # fmt: skip


def test_turbo_is_rejected_without_an_assistant(tiny_model: TinyModel) -> None:
    """By its name in the config, and by model_index.json if the config names no flavour."""
    broken = [one for one in broken_rules(config(flavour="turbo")) if one.path == ("model", "assistant_adapter")]
    assert "distilled" in broken[0].found
    origin = source(tiny_model("krea2", "turbo"))
    unnamed = config(path=str(origin.folder))
    with pytest.raises(ConfigError, match=r"distilled[\s\S]*model.flavour=raw"):
        check_distilled(unnamed, SPEC, origin, facts_of(unnamed, SPEC, origin))
    plain = config(path=str(tiny_model("krea2", "raw")))
    assert check_distilled(plain, SPEC, source(tiny_model("krea2", "raw")), SPEC.inspect(source(
        tiny_model("krea2", "raw")))) is None  # fmt: skip


def test_an_adapter_of_raw_on_turbo(tiny_model: TinyModel, tmp_path: Path) -> None:
    """How the weights are meant to be used: the file of a run on Raw, loaded into Turbo's pipeline by diffusers."""
    folder = tiny_model("krea2", "turbo")
    theirs = Krea2Pipeline.from_pretrained(folder, text_encoder=None, tokenizer=None, vae=None)
    ours = SPEC.load_denoiser(source(folder), SPEC.inspect(source(folder)).experts[0], CPU)
    state = making.state("krea2", making.layer_shapes("krea2", tiny_model, "raw"), "lora", rank=2, alpha=2.0)
    before = predict("krea2", ours)
    theirs.load_lora_weights(save(tmp_path / "raw.safetensors", state, "comfyui", torch.float32))
    merge_module(state, ours)
    torch.testing.assert_close(predict("krea2", ours), predict("krea2", theirs.transformer), **TOLERANCE)
    assert (predict("krea2", ours) - before).abs().max() > 1e-3


# -- single files -----------------------------------------------------------------------------------------------------


OTHER_TENSORS = {
    "text_fusion.": "txtfusion.",
    "txt_in.norm.weight": "txtmlp.0.scale",
    "final_layer.norm.weight": "last.norm.scale",
    "final_layer.scale_shift_table": "last.modulation.lin",
    "transformer_blocks.": "blocks.",
    ".scale_shift_table": ".mod.lin",
    ".norm1.weight": ".prenorm.scale",
    ".norm2.weight": ".postnorm.scale",
    ".attn.norm_q.weight": ".attn.qknorm.qnorm.scale",
    ".attn.norm_k.weight": ".attn.qknorm.knorm.scale",
}
"""Names of norms and tables, ours and the original ones; the key map has those of layers."""


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_single_file_in_the_original_layout(prefix: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """raw.safetensors as it is published, or in a checkpoint of ComfyUI, in the folder of the other parts."""
    folder = copied(tiny_model("krea2", "raw"), tmp_path)
    [expert] = SPEC.inspect(source(folder)).experts
    ours, tensors = SPEC.load_denoiser(source(folder), expert, CPU), {}
    for name, tensor in ours.state_dict().items():
        layer, _, kind = name.rpartition(".")
        found = SPEC.keys.original(layer)
        renamed = f"{found.name}.{kind}" if found is not None else name
        for mine, original in OTHER_TENSORS.items() if found is None else ():
            renamed = renamed.replace(mine, original)
        is_table = renamed.endswith(".mod.lin")
        tensors[prefix + renamed] = tensor.flatten() if is_table else tensor.contiguous()
    save_file(tensors, folder / "raw.safetensors")
    single = open_source(Model.model_validate({"family": "krea2", "path": str(folder / "raw.safetensors")}))
    loaded_from_it = SPEC.load_denoiser(single, expert, CPU)
    assert torch.equal(predict("krea2", loaded_from_it), predict("krea2", ours))


# -- rejections -------------------------------------------------------------------------------------------------------


def test_a_folder_of_another_family(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copied(tiny_model("krea2", "raw"), tmp_path)
    rewrite(folder / "model_index.json", _class_name="Krea2ModularPipeline")
    with pytest.raises(ConfigError, match=r"parts of a Krea2ModularPipeline[\s\S]*Krea2Pipeline[\s\S]*model.family"):
        SPEC.inspect(source(folder))
