"""Tiny FLUX.2 models: the published classes and layer taps, with narrow layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM

from gracetune.models.common.tiny_parts import WIDTH, TinyWeights, build_part, chat_tokenizer, save

_TAPS = 3
_QWEN3_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN3_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
_MISTRAL_SPECIAL = ("<pad>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]")
_MISTRAL_TEMPLATE = (
    "<s>{% for message in messages %}{% set mark = 'SYSTEM_PROMPT' if message.role == 'system' else 'INST' %}"
    "[{{ mark }}]{% for part in message.content %}{{ part.text }}{% endfor %}[/{{ mark }}]{% endfor %}"
)


@dataclass(frozen=True)
class _Recipe:
    double_blocks: int = 2
    distilled: bool = False


_RECIPES = {
    "dev": None,
    "klein-base-9b": _Recipe(double_blocks=6),
    "klein-base-4b": _Recipe(),
    "klein-9b": _Recipe(double_blocks=6, distilled=True),
    "klein-4b": _Recipe(distilled=True),
}
"""None: dev, the only flavour with a guidance input and Mistral's text encoder."""


def build_tiny(folder: Path, flavour: str, *, seed: int = 0) -> Path:
    """Write the tiny model of one flavour into `folder`, in diffusers' layout."""
    recipe, weights = _RECIPES[flavour], TinyWeights(seed)
    parts = {
        "scheduler": _scheduler(),
        "vae": _vae(weights),
        "transformer": _transformer(weights, recipe or _Recipe(), guidance=recipe is None),
    }
    if recipe is None:
        tokenizer = chat_tokenizer(_MISTRAL_SPECIAL, _MISTRAL_TEMPLATE)
        text_encoder = _mistral3(weights, len(tokenizer))
        return save(build_part(Flux2Pipeline, tokenizer=tokenizer, text_encoder=text_encoder, **parts), folder)
    tokenizer = chat_tokenizer(_QWEN3_SPECIAL, _QWEN3_TEMPLATE)
    parts |= {"tokenizer": tokenizer, "text_encoder": _qwen3(weights, len(tokenizer))}
    return save(build_part(Flux2KleinPipeline, is_distilled=recipe.distilled, **parts), folder)


def _text_options(vocabulary: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": WIDTH // 2,
        "max_position_embeddings": 4096,
    }


def _qwen3(weights: TinyWeights, vocabulary: int) -> Any:
    return weights.build(
        Qwen3ForCausalLM, Qwen3Config(**_text_options(vocabulary, layers=28), tie_word_embeddings=True)
    )


def _mistral3(weights: TinyWeights, vocabulary: int) -> Any:
    vision = {"model_type": "pixtral", "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 1,
              "num_attention_heads": 2, "head_dim": WIDTH // 2, "image_size": 64, "patch_size": 16}  # fmt: skip
    text = {"model_type": "mistral", **_text_options(vocabulary, layers=31)}
    return weights.build(Mistral3ForConditionalGeneration, Mistral3Config(text_config=text, vision_config=vision))


def _transformer(weights: TinyWeights, recipe: _Recipe, *, guidance: bool) -> Any:
    return weights.build(
        Flux2Transformer2DModel,
        num_layers=recipe.double_blocks,
        num_single_layers=2,
        num_attention_heads=2,
        attention_head_dim=WIDTH // 2,
        joint_attention_dim=_TAPS * WIDTH,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 4, 4, 4),
    )


def _vae(weights: TinyWeights) -> Any:
    vae = weights.build(
        AutoencoderKLFlux2,
        block_out_channels=(8, 8, 16, 16),
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=32,
    )
    channels = torch.arange(vae.bn.num_features) / vae.bn.num_features
    vae.bn.running_mean.copy_(channels - 0.5)
    vae.bn.running_var.copy_(0.5 + channels)
    return vae


def _scheduler() -> Any:
    return build_part(
        FlowMatchEulerDiscreteScheduler,
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
