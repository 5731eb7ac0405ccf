"""Tiny Z-Image models: the published classes and flow shifts, with narrow layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

from gracetune.models.common.tiny_parts import WIDTH, TinyWeights, build_part, chat_tokenizer, save

_SHIFTS = {"base": 6.0, "turbo": 3.0}
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (  # shorter than the published one
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_HEADS, _AXES = 2, (8, 8, 8)


def build_tiny(folder: Path, flavour: str, *, seed: int = 0) -> Path:
    """Write the tiny model of one flavour into `folder`, in diffusers' layout."""
    weights, tokenizer = TinyWeights(seed), chat_tokenizer(_SPECIAL, _TEMPLATE)
    pipeline = build_part(
        ZImagePipeline,
        scheduler=build_part(FlowMatchEulerDiscreteScheduler, shift=_SHIFTS[flavour]),
        vae=_vae(weights),
        text_encoder=_text_encoder(weights, tokenizer),
        tokenizer=tokenizer,
        transformer=_transformer(weights),
    )
    return save(pipeline, folder)


def _text_encoder(weights: TinyWeights, tokenizer: Qwen2Tokenizer) -> Any:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=WIDTH // 2,
        max_position_embeddings=4096,
    )
    return weights.build(Qwen3Model, config)


def _transformer(weights: TinyWeights) -> Any:
    return weights.build(
        ZImageTransformer2DModel,
        dim=_HEADS * sum(_AXES),
        n_layers=2,
        n_refiner_layers=1,
        n_heads=_HEADS,
        n_kv_heads=_HEADS,
        cap_feat_dim=WIDTH,
        axes_dims=list(_AXES),
        axes_lens=[1536, 512, 512],
    )


def _vae(weights: TinyWeights) -> Any:
    return weights.build(
        AutoencoderKL,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        norm_num_groups=4,
        layers_per_block=1,
        latent_channels=16,
        sample_size=32,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
