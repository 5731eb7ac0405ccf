"""Random valid inputs for each tiny denoiser and VAE, from one seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def inputs_of(model: Any, dtype: torch.dtype) -> tuple[Any, ...] | dict[str, Any]:
    """Random valid inputs for a class, from one seed."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    config = model.config
    match type(model).__name__:
        case "WanTransformer3DModel":
            given = {
                "hidden_states": draw(1, config.in_channels, 2, 4, 4),
                "timestep": torch.tensor([500]),
                "encoder_hidden_states": draw(1, 512, config.text_dim),
            }
            return given | ({"encoder_hidden_states_image": draw(1, 5, config.image_dim)} if config.image_dim else {})
        case "QwenImageTransformer2DModel":
            return {
                "hidden_states": draw(1, 4, config.in_channels),
                "encoder_hidden_states": draw(1, 6, config.joint_attention_dim),
                "encoder_hidden_states_mask": torch.ones(1, 6, dtype=torch.bool),
                "timestep": torch.tensor([0.5], dtype=dtype),
                "img_shapes": [[(1, 2, 2)]],
            }
        case "FluxTransformer2DModel":
            return {
                "hidden_states": draw(1, 4, config.in_channels),
                "encoder_hidden_states": draw(1, 6, config.joint_attention_dim),
                "pooled_projections": draw(1, config.pooled_projection_dim),
                "timestep": torch.tensor([0.5], dtype=dtype),
                "img_ids": torch.zeros(4, 3),
                "txt_ids": torch.zeros(6, 3),
                "guidance": torch.tensor([3.5], dtype=dtype),
            }
        case "Flux2Transformer2DModel":
            return {
                "hidden_states": draw(1, 4, config.in_channels),
                "encoder_hidden_states": draw(1, 6, config.joint_attention_dim),
                "timestep": torch.tensor([0.5], dtype=dtype),
                "img_ids": torch.zeros(4, 4),
                "txt_ids": torch.zeros(6, 4),
                "guidance": torch.tensor([3.5], dtype=dtype),
            }
        case "ZImageTransformer2DModel":
            return {
                "x": [draw(config.in_channels, 1, 4, 4) for _ in range(2)],
                "t": torch.tensor([0.5, 0.5], dtype=dtype),
                "cap_feats": [draw(tokens, config.cap_feat_dim) for tokens in (6, 40)],
            }
        case "Krea2Transformer2DModel":
            visible = torch.tensor([[True] * 5 + [False], [True] * 6])
            return {
                "hidden_states": draw(2, 4, config.in_channels),
                "encoder_hidden_states": draw(2, 6, config.num_text_layers, config.text_hidden_dim),
                "timestep": torch.tensor([0.5, 0.25], dtype=dtype),
                "position_ids": torch.arange(30.0).reshape(10, 3),
                "encoder_attention_mask": visible,
            }
        case "UNet2DConditionModel":
            pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
            return {
                "sample": draw(1, 4, 8, 8),
                "timestep": torch.tensor([500]),
                "encoder_hidden_states": draw(1, 6, config.cross_attention_dim),
                "added_cond_kwargs": {"text_embeds": draw(1, pooled), "time_ids": torch.ones(1, 6, dtype=dtype)},
            }
        case "StableAudioDiTModel":
            return {
                "hidden_states": draw(1, config.in_channels, 8),
                "timestep": torch.tensor([0.5], dtype=dtype),
                "encoder_hidden_states": draw(1, 6, config.cross_attention_input_dim),
                "global_hidden_states": draw(1, 1, config.global_states_input_dim),
            }
        case "AutoencoderKLWan":
            return (draw(1, 3, 5, 32, 32),)
        case "AutoencoderKLQwenImage":
            return (draw(1, 3, 1, 32, 32),)
        case "AutoencoderKL" | "AutoencoderKLFlux2":
            return (draw(1, 3, 32, 32),)
        case "AutoencoderOobleck":
            return (draw(1, config.audio_channels, 4 * model.hop_length),)
    raise AssertionError(f"no inputs for {type(model).__name__}")


def answer(model: Any, dtype: torch.dtype) -> Tensor:
    given = inputs_of(model, dtype)
    with torch.no_grad():
        out = model(**given, return_dict=False)[0] if isinstance(given, dict) else model(*given, return_dict=False)[0]
    return as_tensor(out)


def as_tensor(output: Tensor | list[Tensor]) -> Tensor:
    """A denoiser's output: some return one tensor for each sample."""
    return torch.stack(output) if isinstance(output, list) else output
