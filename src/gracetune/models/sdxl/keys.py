"""SDXL's layer names in the weights Stability AI published: numbered input, middle and output blocks.

diffusers numbers levels, and layers within a level. Both have two layers per level on the way down and three on the way
up. Which levels have attention depends on the model.
"""

from __future__ import annotations

from collections.abc import Iterator

from gracetune.models.keys import KeyMap, KeyMapRule

_LEVELS, _LAYERS = 3, 2
_RESNET = (
    ("conv1", "in_layers.2"),
    ("time_emb_proj", "emb_layers.1"),
    ("conv2", "out_layers.3"),
    ("conv_shortcut", "skip_connection"),
)
_TRANSFORMER = (
    *(f"{attention}.{name}" for attention in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v", "to_out.0")),
    "ff.net.0.proj",
    "ff.net.2",
)


def _resnet(ours: str, original: str) -> Iterator[KeyMapRule]:
    for our_name, original_name in _RESNET:
        yield KeyMapRule(f"{ours}.{our_name}", f"{original}.{original_name}")


def _attention(ours: str, original: str) -> Iterator[KeyMapRule]:
    yield KeyMapRule(f"{ours}.proj_in", f"{original}.proj_in")
    for name in _TRANSFORMER:
        yield KeyMapRule(f"{ours}.transformer_blocks.{{}}.{name}", f"{original}.transformer_blocks.{{}}.{name}")
    yield KeyMapRule(f"{ours}.proj_out", f"{original}.proj_out")


def _down() -> Iterator[KeyMapRule]:
    for level in range(_LEVELS):
        for layer in range(_LAYERS):
            block = 1 + level * (_LAYERS + 1) + layer
            yield from _attention(f"down_blocks.{level}.attentions.{layer}", f"input_blocks.{block}.1")
            yield from _resnet(f"down_blocks.{level}.resnets.{layer}", f"input_blocks.{block}.0")
        block = (level + 1) * (_LAYERS + 1)
        yield KeyMapRule(f"down_blocks.{level}.downsamplers.0.conv", f"input_blocks.{block}.0.op")


def _up() -> Iterator[KeyMapRule]:
    for level in range(_LEVELS):
        for layer in range(_LAYERS + 1):
            block = level * (_LAYERS + 1) + layer
            yield from _attention(f"up_blocks.{level}.attentions.{layer}", f"output_blocks.{block}.1")
            yield from _resnet(f"up_blocks.{level}.resnets.{layer}", f"output_blocks.{block}.0")
        last = level * (_LAYERS + 1) + _LAYERS
        # Third in its block, after the attention. The level without attention has no upsampler.
        yield KeyMapRule(f"up_blocks.{level}.upsamplers.0.conv", f"output_blocks.{last}.2.conv")


KEYS = KeyMap(
    family="sdxl",
    component="unet",
    rules=(
        KeyMapRule("conv_in", "input_blocks.0.0"),
        KeyMapRule("time_embedding.linear_1", "time_embed.0"),
        KeyMapRule("time_embedding.linear_2", "time_embed.2"),
        KeyMapRule("add_embedding.linear_1", "label_emb.0.0"),
        KeyMapRule("add_embedding.linear_2", "label_emb.0.2"),
        *_down(),
        *_resnet("mid_block.resnets.0", "middle_block.0"),
        *_attention("mid_block.attentions.0", "middle_block.1"),
        *_resnet("mid_block.resnets.1", "middle_block.2"),
        *_up(),
        KeyMapRule("conv_out", "out.2"),
    ),
    architecture="stable-diffusion-xl-v1-base",
    base_version="sdxl_base_v1-0",
    also_read_by=(
        ("kohya", "sd-scripts"),
        ("kohya", "lycoris"),
        ("kohya", "diffusers"),
        ("lycoris", "comfyui"),
    ),
    header_marks=("sdxl", "stable-diffusion-xl"),
)
