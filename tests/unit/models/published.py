"""The published architectures, as constructor arguments of the diffusers and transformers classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    AutoencoderOobleck,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    Krea2Transformer2DModel,
    QwenImageTransformer2DModel,
    StableAudioDiTModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModel,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

Build = Callable[[], nn.Module]

WAN: dict[str, dict[str, Any]] = {
    "t2v-14b-2.2": {},
    "i2v-14b-2.2": {"in_channels": 36},
    "ti2v-5b-2.2": {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48,
                    "out_channels": 48},
    "t2v-1.3b-2.1": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "t2v-14b-2.1": {},
    "i2v-14b-480p-2.1": {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
    "i2v-14b-720p-2.1": {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
}  # fmt: skip
QWEN: dict[str, dict[str, Any]] = {
    "t2i": {},
    "t2i-2512": {},
    "edit": {},
    "edit-2509": {},
    "edit-2511": {"zero_cond_t": True},
}
FLUX = {
    "dev": {"guidance_embeds": True},
    "krea": {"guidance_embeds": True},
    "schnell": {"guidance_embeds": False},
    "kontext": {"guidance_embeds": True},
}
FLUX2: dict[str, dict[str, Any]] = {
    "dev": {},
    **{name: {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288,
              "guidance_embeds": False} for name in ("klein-base-9b", "klein-9b")},
    **{name: {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680,
              "guidance_embeds": False} for name in ("klein-base-4b", "klein-4b")},
}  # fmt: skip
SDXL = {
    "sample_size": 128, "in_channels": 4, "out_channels": 4, "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10), "layers_per_block": 2, "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20), "use_linear_projection": True, "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip


def denoiser(family: str, flavour: str, **changes: Any) -> nn.Module:
    if family == "wan":
        return WanTransformer3DModel(**(WAN[flavour] | changes))
    if family == "qwen_image":
        return QwenImageTransformer2DModel(**(QWEN[flavour] | changes))
    if family == "flux":
        return FluxTransformer2DModel(**(FLUX[flavour] | changes))
    if family == "flux2":
        return Flux2Transformer2DModel(**(FLUX2[flavour] | changes))
    if family == "z_image":
        return ZImageTransformer2DModel(**({"axes_lens": [1536, 512, 512]} | changes))
    if family == "krea2":
        return Krea2Transformer2DModel(**changes)
    if family == "sdxl":
        return UNet2DConditionModel(**SDXL)
    return StableAudioDiTModel(**changes)


def inputs(family: str, flavour: str, *, batch: int, side: int, text: int) -> dict[str, Any]:
    """A batch of `side` x `side` tokens (SDXL: latent pixels; audio: columns)."""
    tokens, caption = side * side, torch.empty(batch, text, 4096)
    if family == "wan":
        options = WAN[flavour]
        given = {
            "hidden_states": torch.empty(batch, options.get("in_channels", 16), 1, 2 * side, 2 * side),
            "timestep": torch.ones(batch),
            "encoder_hidden_states": caption,
        }
        image = {"encoder_hidden_states_image": torch.empty(batch, 257, 1280)} if "image_dim" in options else {}
        return given | image
    if family == "qwen_image":
        return {
            "hidden_states": torch.empty(batch, tokens, 64),
            "encoder_hidden_states": torch.empty(batch, text, 3584),
            "encoder_hidden_states_mask": None,
            "timestep": torch.ones(batch),
            "img_shapes": [[(1, side, side // 2)] * 2] * batch,  # an image and a reference, or both halves of an image
        }
    if family == "z_image":
        return {
            "x": [*torch.empty(batch, 16, 1, 2 * side, 2 * side)],
            "t": torch.ones(batch),
            "cap_feats": [*torch.empty(batch, text, 2560)],
        }
    if family == "krea2":
        return {
            "hidden_states": torch.empty(batch, tokens, 64),
            "encoder_hidden_states": torch.empty(batch, text, 12, 2560),
            "timestep": torch.ones(batch),
            "position_ids": torch.empty(text + tokens, 3),
        }
    if family == "flux":
        return {
            "hidden_states": torch.empty(batch, tokens, 64),
            "encoder_hidden_states": caption,
            "pooled_projections": torch.empty(batch, 768),
            "timestep": torch.ones(batch),
            "img_ids": torch.empty(tokens, 3),
            "txt_ids": torch.empty(text, 3),
            "guidance": torch.ones(batch),
        }
    if family == "flux2":
        return {
            "hidden_states": torch.empty(batch, tokens, 128),
            "encoder_hidden_states": torch.empty(batch, text, FLUX2[flavour].get("joint_attention_dim", 15360)),
            "timestep": torch.ones(batch),
            "img_ids": torch.empty(tokens, 4),
            "txt_ids": torch.empty(text, 4),
            "guidance": torch.ones(batch),
        }
    if family == "sdxl":
        extra = {"text_embeds": torch.empty(batch, 1280), "time_ids": torch.empty(batch, 6)}
        return {
            "sample": torch.empty(batch, 4, side, side),
            "timestep": torch.ones(batch),
            "encoder_hidden_states": torch.empty(batch, text, 2048),
            "added_cond_kwargs": extra,
        }
    rotary = torch.empty(tokens + 1, 32, dtype=torch.float32)
    return {
        "hidden_states": torch.empty(batch, 64, tokens),
        "timestep": torch.ones(batch),
        "encoder_hidden_states": torch.empty(batch, text, 768),
        "global_hidden_states": torch.empty(batch, 1, 1536),
        "rotary_embedding": (rotary, rotary.clone()),
    }


@dataclass(frozen=True)
class Vae:
    build: Build
    channels: int
    spatial: int
    video: bool = False


def _kl(channels: int, **more: Any) -> nn.Module:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=channels,
        **more,
    )


def _wan_2_2() -> nn.Module:
    return AutoencoderKLWan(
        base_dim=160, decoder_base_dim=256, z_dim=48, in_channels=12, out_channels=12, is_residual=True, patch_size=2,
        scale_factor_spatial=16, scale_factor_temporal=4, latents_mean=[0.0] * 48, latents_std=[1.0] * 48,
    )  # fmt: skip


VAES = {
    "VAE (SDXL)": Vae(lambda: _kl(4), 4, 8),
    "VAE (FLUX)": Vae(lambda: _kl(16, use_quant_conv=False, use_post_quant_conv=False), 16, 8),
    "VAE (FLUX.2)": Vae(AutoencoderKLFlux2, 32, 8),
    "VAE (Wan 2.1)": Vae(AutoencoderKLWan, 16, 8, video=True),
    "VAE (Wan 2.2)": Vae(_wan_2_2, 48, 16, video=True),
    "VAE (Qwen-Image)": Vae(AutoencoderKLQwenImage, 16, 8),
    "VAE (Oobleck)": Vae(AutoencoderOobleck, 64, 2048),
}


def _t5(vocabulary: int, width: int = 4096, **more: Any) -> dict[str, Any]:
    large = {"d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
    return {"vocab_size": vocabulary, "d_model": width, "d_kv": 64, **(large | more)}


def _clip(width: int, layers: int, heads: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads,
        projection_dim=width,
    )  # fmt: skip


def _qwen_vl() -> nn.Module:
    text = {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
    }  # fmt: skip
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3() -> nn.Module:
    config = Qwen3Config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3Model(config)


def _qwen3_8b() -> nn.Module:
    config = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def _mistral3() -> nn.Module:
    return Mistral3ForConditionalGeneration(Mistral3Config(tie_word_embeddings=False, spatial_merge_size=2))


def _qwen3_vl() -> nn.Module:
    text = {
        "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "rope_parameters": {
            "rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_theta": 5e6,
        },
    }  # fmt: skip
    vision = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560,
              "deepstack_visual_indexes": [5, 11, 17]}  # fmt: skip
    return Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision))


_VIT_H = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
          "image_size": 224, "patch_size": 14}  # fmt: skip

ENCODERS: dict[str, Build] = {
    "text encoder (UMT5-XXL)": lambda: UMT5EncoderModel(UMT5Config(**_t5(256384))),
    "text encoder (T5-XXL)": lambda: T5EncoderModel(T5Config(**_t5(32128))),
    "text encoder (T5-base)": lambda: T5EncoderModel(
        T5Config(**_t5(32128, 768, d_ff=3072, num_layers=12, num_heads=12, feed_forward_proj="relu"))
    ),
    "text encoder (CLIP-L)": lambda: CLIPTextModel(_clip(768, 12, 12)),
    "text encoder (CLIP-bigG)": lambda: CLIPTextModelWithProjection(_clip(1280, 32, 20)),
    "text encoder (Qwen2.5-VL 7B)": _qwen_vl,
    "text encoder (Qwen3 4B)": _qwen3,
    "text encoder (Qwen3 8B)": _qwen3_8b,
    "text encoder (Mistral Small 3)": _mistral3,
    "text encoder (Qwen3-VL 4B)": _qwen3_vl,
    "image encoder (CLIP ViT-H)": lambda: CLIPVisionModel(CLIPVisionConfig(**_VIT_H)),
    "conditioning projection": lambda: StableAudioProjectionModel(768, 768, 0, 512),
}
