"""Wan's layer names in the weights Wan-AI published, which ComfyUI uses too."""

from __future__ import annotations

from collections.abc import Iterator

from gracetune.models.keys import KeyMap, KeyMapRule


def _block() -> Iterator[KeyMapRule]:
    for ours, original in (("attn1", "self_attn"), ("attn2", "cross_attn")):
        for name in "qkv":
            yield KeyMapRule(f"blocks.{{}}.{ours}.to_{name}", f"blocks.{{}}.{original}.{name}")
        yield KeyMapRule(f"blocks.{{}}.{ours}.to_out.0", f"blocks.{{}}.{original}.o")
    for name in "kv":  # the 2.1 image-to-video weights with an image encoder
        yield KeyMapRule(f"blocks.{{}}.attn2.add_{name}_proj", f"blocks.{{}}.cross_attn.{name}_img")
    yield KeyMapRule("blocks.{}.ffn.net.0.proj", "blocks.{}.ffn.0")
    yield KeyMapRule("blocks.{}.ffn.net.2", "blocks.{}.ffn.2")


KEYS = KeyMap(
    family="wan",
    component="transformer",
    rules=(
        KeyMapRule("patch_embedding", "patch_embedding"),
        KeyMapRule("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
        KeyMapRule("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
        KeyMapRule("condition_embedder.time_proj", "time_projection.1"),
        KeyMapRule("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
        KeyMapRule("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
        KeyMapRule("condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"),
        KeyMapRule("condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"),
        *_block(),
        KeyMapRule("proj_out", "head.head"),
    ),
    experts=True,
    depths=(("blocks", 40),),
    architecture="wan",
    of_experts=("wan2.2", "wan_2.2_14b"),  # files do not say which single-expert Wan they are for
    also_read_by=(("comfyui", "diffusers"), ("kohya", "musubi")),
    header_marks=("wan",),
)
