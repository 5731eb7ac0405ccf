"""Stable Audio's layer names in the weights Stability AI published, which fuse query, key and value into one matrix.

ComfyUI only knows these names for this family.
"""

from __future__ import annotations

from gracetune.models.keys import Fused, KeyMap, KeyMapRule

_OURS, _THEIRS = "transformer_blocks.{}", "transformer.layers.{}"

KEYS = KeyMap(
    family="stable_audio",
    component="transformer",
    pipeline_loads_lora=False,
    rules=(
        *(
            KeyMapRule(f"{ours}.{number}", f"{original}.{number}")
            for ours, original in (
                ("timestep_proj", "to_timestep_embed"),
                ("global_proj", "to_global_embed"),
                ("cross_attention_proj", "to_cond_embed"),
            )
            for number in (0, 2)
        ),
        KeyMapRule("preprocess_conv", "preprocess_conv"),
        KeyMapRule("proj_in", "transformer.project_in"),
        KeyMapRule(f"{_OURS}.attn1.to_out.0", f"{_THEIRS}.self_attn.to_out"),
        KeyMapRule(f"{_OURS}.attn2.to_q", f"{_THEIRS}.cross_attn.to_q"),
        KeyMapRule(f"{_OURS}.attn2.to_out.0", f"{_THEIRS}.cross_attn.to_out"),
        KeyMapRule(f"{_OURS}.ff.net.0.proj", f"{_THEIRS}.ff.ff.0.proj"),
        KeyMapRule(f"{_OURS}.ff.net.2", f"{_THEIRS}.ff.ff.2"),
        KeyMapRule("proj_out", "transformer.project_out"),
        KeyMapRule("postprocess_conv", "postprocess_conv"),
    ),
    fused=(
        Fused(f"{_THEIRS}.self_attn.to_qkv", tuple((f"{_OURS}.attn1.to_{name}", 1) for name in "qkv")),
        Fused(f"{_THEIRS}.cross_attn.to_kv", tuple((f"{_OURS}.attn2.to_{name}", 1) for name in "kv")),
    ),
    depths=(("transformer_blocks", 24),),
    architecture="stable-audio-open-1.0",
    base_version="stable_audio_open_1.0",
    header_marks=("stable_audio", "stable-audio"),
)
