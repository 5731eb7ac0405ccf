"""Tiny Krea 2 models: the published classes, prompt template and flow shifts, with narrow layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel

from gracetune.models.common.tiny_parts import WIDTH, TinyWeights, build_part, save
from gracetune.models.common.tiny_qwen import qwen3_vl, tokenizer_for_templates
from gracetune.models.krea2.load import RAW, TURBO

_TAPS = (1, 2)
"""The published pipeline reads twelve of 37 hidden states."""
_HEADS = 2
_DISTILLED = {RAW: False, TURBO: True}


def build_tiny(folder: Path, flavour: str, *, seed: int = 0) -> Path:
    """Write the tiny model of one flavour into `folder`, in diffusers' layout."""
    weights, tokenizer = TinyWeights(seed), tokenizer_for_templates(_templates())
    pipeline = build_part(
        Krea2Pipeline,
        scheduler=_scheduler(),
        vae=weights.build(AutoencoderKLQwenImage, base_dim=8, num_res_blocks=1),
        text_encoder=qwen3_vl(weights, tokenizer, layers=3),
        tokenizer=tokenizer,
        transformer=_transformer(weights),
        text_encoder_select_layers=_TAPS,
        is_distilled=_DISTILLED[flavour],
    )
    return save(pipeline, folder)


def _templates() -> list[str]:
    parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "transformer"))
    pipeline = build_part(Krea2Pipeline, **parts)
    return [pipeline.prompt_template_encode_prefix, pipeline.prompt_template_encode_suffix]


def _scheduler() -> Any:
    return build_part(
        FlowMatchEulerDiscreteScheduler,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=6400,
        time_shift_type="exponential",
    )


def _transformer(weights: TinyWeights) -> Any:
    return weights.build(
        Krea2Transformer2DModel,
        num_layers=2,
        attention_head_dim=WIDTH // _HEADS,
        num_attention_heads=_HEADS,
        num_key_value_heads=1,
        intermediate_size=3 * WIDTH,
        timestep_embed_dim=WIDTH,
        text_hidden_dim=WIDTH,
        num_text_layers=len(_TAPS),
        text_num_attention_heads=_HEADS,
        text_num_key_value_heads=_HEADS,
        text_intermediate_size=2 * WIDTH,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
