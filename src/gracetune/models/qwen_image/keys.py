"""Qwen-Image's layer names. It was published in diffusers' layout, and ComfyUI kept these names."""

from __future__ import annotations

from gracetune.models.keys import KeyMap, KeyMapRule

_BLOCK = (
    "img_mod.1",
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj", "add_q_proj")),
    "attn.to_out.0",
    "attn.to_add_out",
    *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mod.1", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
)
_LAYERS = (
    "time_text_embed.timestep_embedder.linear_1",
    "time_text_embed.timestep_embedder.linear_2",
    "img_in",
    "txt_in",
    *(f"transformer_blocks.{{}}.{layer}" for layer in _BLOCK),
    "norm_out.linear",
    "proj_out",
)

KEYS = KeyMap(
    family="qwen_image",
    component="transformer",
    rules=tuple(KeyMapRule(layer, layer) for layer in _LAYERS),
    depths=(("transformer_blocks", 60),),
    architecture="qwen-image",
    base_version="qwen_image",
    also_read_by=(
        ("comfyui", "diffusers"),
        ("diffusers", "comfyui"),
        ("kohya", "musubi"),
        ("kohya", "diffusers"),
        ("lycoris", "comfyui"),
    ),
    header_marks=("qwen",),
)
