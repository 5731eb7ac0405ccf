"""Recognizing a Wan folder by its configuration files, and loading its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import nn
from transformers import CLIPImageProcessorPil, CLIPVisionModel, UMT5EncoderModel

from gracetune.diffusion.schedule import Flow
from gracetune.errors import ConfigError, Problem
from gracetune.models.common.gelu import use_sigmoid
from gracetune.models.common.pipelines import assemble
from gracetune.models.layout import (
    CONFIG,
    SCHEDULER,
    TOKENIZER,
    part_config,
    pipeline_name,
    read_config,
    read_index,
    require_parts,
)
from gracetune.models.loading import build_component, load_component, load_text_model
from gracetune.models.source import INDEX, ModelSource
from gracetune.models.spec import Expert, ModelFacts, PartPlacement
from gracetune.models.wan.blocks import use_fused_blocks, use_pairwise_attention

FROM_TEXT, FROM_IMAGE = "WanPipeline", "WanImageToVideoPipeline"
TEXT_TOKENS = 512
"""Caption tokens the denoisers read, padded. Cross-attention separates image and caption by this number."""
MASK_CHANNELS = 4
"""Channels of the first-frame mask: one for each of the four frames in a latent frame."""
_WIDTHS = {1536: "t2v-1.3b-2.1", 5120: "t2v-14b-2.1"}
"""Width of the denoiser -> flavour, for 2.1 text-to-video weights."""
_HIGH_RESOLUTION_SHIFT = 4.0
"""Separates the 2.1 weights for 720p, which are sampled with a flow shift of 5, from the others, which use 3."""


@dataclass(frozen=True)
class Configuration:
    """The configuration files that decide which flavour a folder is."""

    index: Mapping[str, Any]
    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    scheduler: Mapping[str, Any]

    @property
    def two_experts(self) -> bool:
        return is_part(self.index, "transformer_2")

    @property
    def expand_timesteps(self) -> bool:
        return bool(self.index.get("expand_timesteps"))

    @property
    def image_encoder(self) -> bool:
        return self.transformer.get("image_dim") is not None

    @property
    def width(self) -> int:
        return int(self.transformer["num_attention_heads"] * self.transformer["attention_head_dim"])

    @property
    def condition_channels(self) -> int:
        return int(self.transformer["in_channels"] - self.vae["z_dim"])

    @property
    def from_image(self) -> bool:
        return self.condition_channels > 0

    @property
    def shift(self) -> float:
        return float(self.scheduler.get("flow_shift", self.scheduler.get("shift", 1.0)))


def inspect(source: ModelSource) -> ModelFacts:
    """The facts of a Wan folder. ConfigError if it is incomplete or not one of the supported weights."""
    pipeline_name(source, "wan", dict.fromkeys([FROM_TEXT, FROM_IMAGE]))
    index = read_index(source)
    _check_parts(source, index)
    found = Configuration(
        index,
        part_config(source, "transformer", WanTransformer3DModel),
        part_config(source, "vae", AutoencoderKLWan),
        read_config(source, "scheduler", SCHEDULER),
    )
    problems = [*_unknown(source, found)]
    if problems:
        raise ConfigError(problems)
    flavour, reason = _flavour(found)
    return ModelFacts(
        family="wan",
        flavour=flavour,
        experts=_experts(found),
        schedule=Flow(float(found.scheduler.get("num_train_timesteps", 1000))),
        shift=found.shift,
        details={
            "recognised": reason,
            "pipeline": found.index["_class_name"],
            "from_image": found.from_image,
            "image_encoder": found.image_encoder,
            "expand_timesteps": found.expand_timesteps,
            "patch_size": tuple(found.transformer["patch_size"]),
            "side_multiple": found.vae["scale_factor_spatial"] * found.transformer["patch_size"][1],
            "frame_step": found.vae["scale_factor_temporal"],
        },
    )


def is_part(index: Mapping[str, Any], component: str) -> bool:
    """Whether model_index.json names a class for a part. Absent parts are written as [null, null]."""
    entry = index.get(component)
    return isinstance(entry, list) and len(entry) == 2 and None not in entry


def _check_parts(source: ModelSource, index: Mapping[str, Any]) -> None:
    optional = [part for part in ("transformer_2", "image_encoder") if is_part(index, part)]
    parts = dict.fromkeys(["transformer", "vae", "text_encoder", *optional], CONFIG)
    parts |= {"tokenizer": TOKENIZER, "scheduler": SCHEDULER}
    if is_part(index, "image_encoder"):
        parts["image_processor"] = "preprocessor_config.json"
    require_parts(source, parts)


def _unknown(source: ModelSource, found: Configuration) -> Iterator[Problem]:
    """Related weights that are not supported: they would load, and then train incorrectly."""
    index, transformer = str(source.folder / INDEX), str(source.part("transformer") / "config.json")
    hint = "use one of the published Wan 2.1 or 2.2 text-to-video or image-to-video weights"
    boundary = found.index.get("boundary_ratio")
    if found.two_experts and not (isinstance(boundary, float) and 0 < boundary < 1):
        expected = "the noise level at which transformer_2 takes over, between 0 and 1"
        yield Problem(
            "boundary_ratio", repr(boundary), expected, "0.875 for text-to-video, 0.9 for image-to-video", index
        )
    if not found.two_experts and boundary is not None:
        yield Problem("transformer_2", f"none, but boundary_ratio {boundary}", "both experts", hint, index)
    image = found.vae["z_dim"] + MASK_CHANNELS
    if found.condition_channels not in (0, image):
        expected = f"{found.vae['z_dim']} (text-to-video) or {found.vae['z_dim'] + image} (image-to-video)"
        yield Problem("in_channels", str(found.transformer["in_channels"]), expected, hint, transformer)
    if found.transformer.get("pos_embed_seq_len") is not None:
        yield Problem(
            "pos_embed_seq_len", "weights that start from a first and a last frame", "none", hint, transformer
        )
    if found.image_encoder and not is_part(found.index, "image_encoder"):
        yield Problem("image_encoder", "missing, but the transformer has an image_dim", "a part", hint, index)
    if found.from_image and not (found.two_experts or found.image_encoder):
        missing = "neither a second expert (2.2) nor an image encoder (2.1)"
        yield Problem("transformer_2", missing, "one of them in an image-to-video model", hint, index)
    if found.index["_class_name"] == FROM_IMAGE and not (found.from_image or found.expand_timesteps):
        given = f"{found.transformer['in_channels']} in_channels, which have no room for a first frame"
        yield Problem("_class_name", f"{FROM_IMAGE}, but {given}", FROM_TEXT, hint, index)


def _flavour(found: Configuration) -> tuple[str, str]:
    """The flavour, and the reason for it."""
    channels = f"{found.transformer['in_channels']} input channels"
    if found.expand_timesteps:
        return "ti2v-5b-2.2", f"expand_timesteps, {channels}"
    if found.two_experts:
        boundary = f"two experts that meet at {found.index['boundary_ratio']}"
        return ("i2v-14b-2.2" if found.from_image else "t2v-14b-2.2"), f"{boundary}, {channels}"
    large = found.shift >= _HIGH_RESOLUTION_SHIFT
    if found.from_image:
        flavour = "i2v-14b-720p-2.1" if large else "i2v-14b-480p-2.1"
        return flavour, f"one expert with an image encoder, {channels}, flow shift {found.shift:g}"
    known = _WIDTHS.get(found.width)
    if known is not None:
        return known, f"one expert, {channels}, {found.width} wide"
    flavour = "t2v-14b-2.1" if large else "t2v-1.3b-2.1"
    return flavour, f"one expert, {channels}; its width of {found.width} is unknown, its flow shift is {found.shift:g}"


def _experts(found: Configuration) -> tuple[Expert, ...]:
    if not found.two_experts:
        return (Expert("", "transformer"),)
    boundary = float(found.index["boundary_ratio"])
    return Expert("high_noise", "transformer", lowest=boundary), Expert("low_noise", "transformer_2", highest=boundary)


PIPELINES: Mapping[str, Any] = {FROM_TEXT: WanPipeline, FROM_IMAGE: WanImageToVideoPipeline}


def use_fused_operations(denoiser: nn.Module) -> None:
    """Make the denoiser compute the same with fewer reads and writes of its activations."""
    use_pairwise_attention(denoiser)
    use_fused_blocks(denoiser)
    use_sigmoid(denoiser)


def load_denoiser(source: ModelSource, expert: Expert, placement: PartPlacement) -> nn.Module:
    return load_component(source, expert.component, WanTransformer3DModel, placement, adjust=use_fused_operations)


def build_denoiser(source: ModelSource, expert: Expert) -> nn.Module:
    return build_component(source, expert.component, WanTransformer3DModel, adjust=use_fused_operations)


def load_vae(source: ModelSource, placement: PartPlacement) -> Any:
    """Always in float32, whatever the placement's dtype, as published and as the memory plan counts it."""
    return load_component(source, "vae", AutoencoderKLWan, replace(placement, dtype=torch.float32, attention=None))


def load_image_encoder(source: ModelSource, placement: PartPlacement) -> nn.Module:
    return load_text_model(source, "image_encoder", CLIPVisionModel, placement)


def load_image_processor(source: ModelSource) -> CLIPImageProcessorPil:
    """The processor that uses Pillow. torchvision's resizes slightly differently and is not installed everywhere."""
    return CLIPImageProcessorPil.from_pretrained(str(source.part("image_processor")), local_files_only=True)


def load_umt5(source: ModelSource, placement: PartPlacement) -> nn.Module:
    return load_text_model(source, "text_encoder", UMT5EncoderModel, placement)


def load_pipeline(
    source: ModelSource, denoisers: Mapping[str, nn.Module], placement: PartPlacement, facts: ModelFacts | None = None,
    *, with_text: bool = True,
) -> Any:  # fmt: skip
    """The pipeline class the folder names. Experts that are not given are loaded."""
    index, facts = read_index(source), facts or inspect(source)
    parts: dict[str, Any] = {
        expert.component: denoisers[expert.component]
        if expert.component in denoisers
        else load_denoiser(source, expert, placement)
        for expert in facts.experts
    }
    parts.setdefault("transformer_2", None)
    parts["vae"] = load_vae(source, placement)
    parts["text_encoder"] = load_umt5(source, placement) if with_text else None
    if is_part(index, "image_encoder"):
        parts["image_encoder"] = load_image_encoder(source, placement)
        parts["image_processor"] = load_image_processor(source)
    if len(facts.experts) > 1:
        parts["boundary_ratio"] = facts.experts[0].lowest
    return assemble(PIPELINES[index["_class_name"]], source, parts, tokenizers=("tokenizer",))
