"""FLUX.2's layer names in the weights Black Forest Labs published, which fuse query, key and value of double blocks.

The single blocks' fused matrices (query, key, value and feed-forward) are fused in diffusers' model too. ComfyUI also
supports diffusers' own paths for this family and slices the fused matrices itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from gracetune.models.keys import Fused, KeyMap, KeyMapRule

_OURS, _THEIRS = "transformer_blocks.{}", "double_blocks.{}"
_SINGLE, _THEIR_SINGLE = "single_transformer_blocks.{}", "single_blocks.{}"
_MODULATIONS = ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")


def _rules() -> Iterator[KeyMapRule]:
    for ours, original in (("timestep", "time_in"), ("guidance", "guidance_in")):
        for number, layer in ((1, "in_layer"), (2, "out_layer")):
            yield KeyMapRule(f"time_guidance_embed.{ours}_embedder.linear_{number}", f"{original}.{layer}")
    for modulation in _MODULATIONS:
        yield KeyMapRule(f"{modulation}.linear", f"{modulation}.lin")
    yield KeyMapRule("context_embedder", "txt_in")
    yield KeyMapRule("x_embedder", "img_in")
    yield KeyMapRule(f"{_OURS}.attn.to_out.0", f"{_THEIRS}.img_attn.proj")
    yield KeyMapRule(f"{_OURS}.attn.to_add_out", f"{_THEIRS}.txt_attn.proj")
    for ours, original in (("ff", "img_mlp"), ("ff_context", "txt_mlp")):
        for layer, number in (("linear_in", 0), ("linear_out", 2)):
            yield KeyMapRule(f"{_OURS}.{ours}.{layer}", f"{_THEIRS}.{original}.{number}")
    yield KeyMapRule(f"{_SINGLE}.attn.to_qkv_mlp_proj", f"{_THEIR_SINGLE}.linear1")
    yield KeyMapRule(f"{_SINGLE}.attn.to_out", f"{_THEIR_SINGLE}.linear2")
    yield KeyMapRule("norm_out.linear", "final_layer.adaLN_modulation.1", halves_swapped=True)
    yield KeyMapRule("proj_out", "final_layer.linear")


KEYS = KeyMap(
    family="flux2",
    component="transformer",
    rules=tuple(_rules()),
    fused=(
        Fused(f"{_THEIRS}.img_attn.qkv", tuple((f"{_OURS}.attn.to_{name}", 1) for name in "qkv")),
        Fused(f"{_THEIRS}.txt_attn.qkv", tuple((f"{_OURS}.attn.add_{name}_proj", 1) for name in "qkv")),
    ),
    shapes=(
        *((f"{_THEIRS}.{stream}_mlp.0", Fraction(6)) for stream in ("img", "txt")),
        *((f"{_THEIRS}.{stream}_mlp.2", Fraction(1, 3)) for stream in ("img", "txt")),
        (f"{_THEIR_SINGLE}.linear1", Fraction(9)),
        (f"{_THEIR_SINGLE}.linear2", Fraction(1, 4)),
    ),
    depths=(("transformer_blocks", 8), ("single_transformer_blocks", 48)),
    comfyui_takes_ours=True,
    architecture="flux-2",
    base_version="flux2",
    also_read_by=(("diffusers", "comfyui"), ("lycoris", "comfyui")),
    header_marks=("flux2", "flux-2", "flux.2"),
)
