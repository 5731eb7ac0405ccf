"""Krea 2's layer names: diffusers', and those of the published single files, which ComfyUI keeps.

No matrices are fused, so every layer has one name in each layout.
"""

from __future__ import annotations

from collections.abc import Iterator

from gracetune.models.keys import KeyMap, KeyMapRule

_BLOCK = (
    *((f"attn.to_{part}", f"attn.w{part}") for part in "qkv"),
    ("attn.to_gate", "attn.gate"),
    ("attn.to_out.0", "attn.wo"),
    *((f"ff.{part}", f"mlp.{part}") for part in ("gate", "up", "down")),
)
_BLOCKS = (
    ("transformer_blocks", "blocks"),
    *((f"text_fusion.{kind}", f"txtfusion.{kind}") for kind in ("layerwise_blocks", "refiner_blocks")),
)
_OUTSIDE = (
    ("img_in", "first"),
    ("time_embed.linear_1", "tmlp.0"),
    ("time_embed.linear_2", "tmlp.2"),
    ("time_mod_proj", "tproj.1"),
    ("text_fusion.projector", "txtfusion.projector"),
    ("txt_in.linear_1", "txtmlp.1"),
    ("txt_in.linear_2", "txtmlp.3"),
    ("final_layer.linear", "last.linear"),
)


def _rules() -> Iterator[KeyMapRule]:
    for ours, original in _OUTSIDE:
        yield KeyMapRule(ours, original)
    for blocks, originals in _BLOCKS:
        for ours, original in _BLOCK:
            yield KeyMapRule(f"{blocks}.{{}}.{ours}", f"{originals}.{{}}.{original}")


KEYS = KeyMap(
    family="krea2",
    component="transformer",
    rules=tuple(_rules()),
    depths=(("transformer_blocks", 28), ("text_fusion.layerwise_blocks", 2), ("text_fusion.refiner_blocks", 2)),
    architecture="krea2",
    base_version="krea2",
    converter_reads_alpha=False,
    also_read_by=(
        ("comfyui", "diffusers"),
        ("diffusers", "comfyui"),
        ("kohya", "musubi"),
        ("lycoris", "comfyui"),
    ),
    header_marks=("krea2", "krea-2", "krea_2"),
)
