"""One prediction of each family's tiny denoiser, always on the same input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def predict(family: str, model: Any) -> Tensor:
    config = model.config
    result: Tensor | list[Tensor] = model(**_INPUTS[family](config), return_dict=False)[0]
    return torch.stack(result) if isinstance(result, list) else result


def _wan(config: Any) -> dict[str, Any]:
    given = {
        "hidden_states": values(1, config.in_channels, 3, 4, 4),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": values(1, 5, config.text_dim, seed=1),
    }
    if config.image_dim is not None:
        given["encoder_hidden_states_image"] = values(1, 6, config.image_dim, seed=2)
    return given


def _qwen_image(config: Any) -> dict[str, Any]:
    return {
        "hidden_states": values(1, 16, config.in_channels),
        "encoder_hidden_states": values(1, 5, config.joint_attention_dim, seed=1),
        "encoder_hidden_states_mask": None,
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 4, 4)]],
    }


def _flux(config: Any) -> dict[str, Any]:
    guidance = {"guidance": torch.tensor([3.5])} if config.guidance_embeds else {}
    return guidance | {
        "hidden_states": values(1, 16, config.in_channels),
        "encoder_hidden_states": values(1, 5, config.joint_attention_dim, seed=1),
        "pooled_projections": values(1, config.pooled_projection_dim, seed=2),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }


def _flux2(config: Any) -> dict[str, Any]:
    return {
        "hidden_states": values(1, 16, config.in_channels),
        "encoder_hidden_states": values(1, 5, config.joint_attention_dim, seed=1),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 4),
        "txt_ids": torch.zeros(5, 4),
        "guidance": torch.tensor([3.5]),
    }


def _z_image(config: Any) -> dict[str, Any]:
    return {
        "x": [values(config.in_channels, 1, 8, 8)],
        "t": torch.tensor([0.5]),
        "cap_feats": [values(5, config.cap_feat_dim, seed=1)],
    }


def _krea2(config: Any) -> dict[str, Any]:
    return {
        "hidden_states": values(1, 16, config.in_channels),
        "encoder_hidden_states": values(1, 5, config.num_text_layers, config.text_hidden_dim, seed=1),
        "timestep": torch.tensor([0.5]),
        "position_ids": values(21, 3, seed=2),
    }


def _sdxl(config: Any) -> dict[str, Any]:
    width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    extra = {"text_embeds": values(1, width, seed=2), "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]])}
    return {
        "sample": values(1, 4, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": values(1, 5, config.cross_attention_dim, seed=1),
        "added_cond_kwargs": extra,
    }


def _stable_audio(config: Any) -> dict[str, Any]:
    columns, half = 8, config.attention_head_dim // 2
    angles = values(columns + 1, half, seed=3)
    return {
        "hidden_states": values(1, config.in_channels, columns),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": values(1, 5, config.cross_attention_input_dim, seed=1),
        "global_hidden_states": values(1, 1, config.global_states_input_dim, seed=2),
        "rotary_embedding": (angles.cos(), angles.sin()),
    }


_INPUTS = {
    "wan": _wan,
    "qwen_image": _qwen_image,
    "flux": _flux,
    "flux2": _flux2,
    "z_image": _z_image,
    "krea2": _krea2,
    "sdxl": _sdxl,
    "stable_audio": _stable_audio,
}
