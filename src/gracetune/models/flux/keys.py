"""FLUX.1's layer names in the weights Black Forest Labs published, which fuse query, key and value into one matrix.

ComfyUI also supports diffusers' own paths for this family and slices the fused matrices itself, so that an adapter on
the query alone stays on the query alone. kohya's scripts use the names of the fused matrices.
`gracetune.models.keys.KeyMap` describes the fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from gracetune.models.keys import Fused, KeyMap, KeyMapRule

_OURS, _THEIRS = "transformer_blocks.{}", "double_blocks.{}"
_SINGLE, _THEIR_SINGLE = "single_transformer_blocks.{}", "single_blocks.{}"


def _embedders() -> Iterator[KeyMapRule]:
    for ours, original in (("timestep", "time_in"), ("guidance", "guidance_in"), ("text", "vector_in")):
        for number, layer in ((1, "in_layer"), (2, "out_layer")):
            yield KeyMapRule(f"time_text_embed.{ours}_embedder.linear_{number}", f"{original}.{layer}")


def _diffsynth_names() -> Iterator[tuple[str, str]]:
    """DiffSynth-Studio's names. Its layers are the original's, with rows in the same order."""
    for theirs, original in (("time_embedder", "time_in"), ("guidance_embedder", "guidance_in")):
        yield f"{theirs}.timestep_embedder.0", f"{original}.in_layer"
        yield f"{theirs}.timestep_embedder.2", f"{original}.out_layer"
    yield "pooled_text_embedder.0", "vector_in.in_layer"
    yield "pooled_text_embedder.2", "vector_in.out_layer"
    for letter, stream in (("a", "img"), ("b", "txt")):
        yield f"blocks.{{}}.norm1_{letter}.linear", f"{_THEIRS}.{stream}_mod.lin"
        yield f"blocks.{{}}.attn.{letter}_to_qkv", f"{_THEIRS}.{stream}_attn.qkv"
        yield f"blocks.{{}}.attn.{letter}_to_out", f"{_THEIRS}.{stream}_attn.proj"
        for number in (0, 2):
            yield f"blocks.{{}}.ff_{letter}.{number}", f"{_THEIRS}.{stream}_mlp.{number}"
    yield f"{_THEIR_SINGLE}.norm.linear", f"{_THEIR_SINGLE}.modulation.lin"
    yield f"{_THEIR_SINGLE}.to_qkv_mlp", f"{_THEIR_SINGLE}.linear1"
    yield f"{_THEIR_SINGLE}.proj_out", f"{_THEIR_SINGLE}.linear2"
    yield "final_norm_out.linear", "final_layer.adaLN_modulation.1"
    yield "final_proj_out", "final_layer.linear"


KEYS = KeyMap(
    family="flux",
    component="transformer",
    rules=(
        *_embedders(),
        KeyMapRule("context_embedder", "txt_in"),
        KeyMapRule("x_embedder", "img_in"),
        KeyMapRule(f"{_OURS}.norm1.linear", f"{_THEIRS}.img_mod.lin"),
        KeyMapRule(f"{_OURS}.norm1_context.linear", f"{_THEIRS}.txt_mod.lin"),
        KeyMapRule(f"{_OURS}.attn.to_out.0", f"{_THEIRS}.img_attn.proj"),
        KeyMapRule(f"{_OURS}.attn.to_add_out", f"{_THEIRS}.txt_attn.proj"),
        KeyMapRule(f"{_OURS}.ff.net.0.proj", f"{_THEIRS}.img_mlp.0"),
        KeyMapRule(f"{_OURS}.ff.net.2", f"{_THEIRS}.img_mlp.2"),
        KeyMapRule(f"{_OURS}.ff_context.net.0.proj", f"{_THEIRS}.txt_mlp.0"),
        KeyMapRule(f"{_OURS}.ff_context.net.2", f"{_THEIRS}.txt_mlp.2"),
        KeyMapRule(f"{_SINGLE}.norm.linear", f"{_THEIR_SINGLE}.modulation.lin"),
        KeyMapRule(f"{_SINGLE}.proj_out", f"{_THEIR_SINGLE}.linear2"),
        KeyMapRule("norm_out.linear", "final_layer.adaLN_modulation.1", halves_swapped=True),
        KeyMapRule("proj_out", "final_layer.linear"),
    ),
    fused=(
        Fused(f"{_THEIRS}.img_attn.qkv", tuple((f"{_OURS}.attn.to_{name}", 1) for name in "qkv")),
        Fused(f"{_THEIRS}.txt_attn.qkv", tuple((f"{_OURS}.attn.add_{name}_proj", 1) for name in "qkv")),
        Fused(
            f"{_THEIR_SINGLE}.linear1",
            (*((f"{_SINGLE}.attn.to_{name}", 1) for name in "qkv"), (f"{_SINGLE}.proj_mlp", 4)),
        ),
    ),
    other_names=tuple(_diffsynth_names()),
    shapes=(
        *((f"{_THEIRS}.{stream}_mlp.0", Fraction(4)) for stream in ("img", "txt")),
        *((f"{_THEIRS}.{stream}_mlp.2", Fraction(1, 4)) for stream in ("img", "txt")),
        (f"{_THEIR_SINGLE}.linear1", Fraction(7)),
        (f"{_THEIR_SINGLE}.linear2", Fraction(1, 5)),
    ),
    depths=(("transformer_blocks", 19), ("single_transformer_blocks", 38)),
    comfyui_takes_ours=True,
    architecture="flux-1",
    base_version="flux1",
    also_read_by=(
        ("comfyui", "diffusers"),
        ("diffusers", "comfyui"),
        ("kohya", "musubi"),
        ("kohya", "sd-scripts"),
        ("lycoris", "comfyui"),
    ),
    header_marks=("flux",),
)
