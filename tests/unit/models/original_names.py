"""Tiny models in the layout their authors published: one file with the original names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_WAN = (
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    (".attn1.", ".self_attn."),
    (".attn2.", ".cross_attn."),
    (".to_out.0.", ".o."),
    (".to_q.", ".q."),
    (".to_k.", ".k."),
    (".to_v.", ".v."),
    ("proj_out", "head.head"),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
    (".scale_shift_table", ".modulation"),
)
_RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0", "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip
_UNET = {
    "conv_in": "input_blocks.0.0", "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0", "conv_out": "out.2",
}  # fmt: skip


def wan(name: str) -> str:
    if name == "scale_shift_table":
        return "head.modulation"
    for ours, original in _WAN:
        name = name.replace(ours, original)
    swapped = {"2": "3", "3": "2"}
    return re.sub(r"^(blocks\.\d+\.norm)([23])", lambda found: found[1] + swapped[found[2]], name)


def sdxl_unet(name: str) -> str:
    """With two layers per level. On the way up, the last level has no attention."""
    for ours, original in _UNET.items():
        if name.startswith(f"{ours}."):
            return f"model.diffusion_model.{original}{name.removeprefix(ours)}"
    side, rest = name.split(".", 1)
    if side == "mid_block":
        kind, index, inner = rest.split(".", 2)
        place = f"middle_block.{2 * int(index) if kind == 'resnets' else 1}"
    else:
        level, kind, index, inner = rest.split(".", 3)
        first = 3 * int(level) + int(index)
        if kind == "downsamplers":
            return f"model.diffusion_model.input_blocks.{3 * (int(level) + 1)}.0.{inner.replace('conv', 'op')}"
        if kind == "upsamplers":
            return f"model.diffusion_model.output_blocks.{3 * int(level) + 2}.2.{inner}"
        block = f"input_blocks.{1 + first}" if side == "down_blocks" else f"output_blocks.{first}"
        place = f"{block}.{0 if kind == 'resnets' else 1}"
    if kind == "resnets":
        layer, end = inner.rsplit(".", 1)
        inner = f"{_RESNET[layer]}.{end}"
    return f"model.diffusion_model.{place}.{inner}"


def sdxl_vae(name: str) -> str:
    found = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    found = re.sub(r"down_blocks\.(\d)\.resnets\.", r"down.\1.block.", found)
    found = re.sub(r"down_blocks\.(\d)\.downsamplers\.0\.", r"down.\1.downsample.", found)
    found = re.sub(r"up_blocks\.(\d)\.resnets\.", lambda m: f"up.{3 - int(m[1])}.block.", found)
    found = re.sub(r"up_blocks\.(\d)\.upsamplers\.0\.", lambda m: f"up.{3 - int(m[1])}.upsample.", found)
    found = re.sub(r"mid_block\.resnets\.(\d)\.", lambda m: f"mid.block_{int(m[1]) + 1}.", found)
    if "mid_block.attentions" in found:
        for ours, original in (
            ("group_norm", "norm"), ("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out"),
        ):  # fmt: skip
            found = found.replace(f"mid_block.attentions.0.{ours}.", f"mid.attn_1.{original}.")
    return f"first_stage_model.{found}"


def vae_tensor(name: str, tensor: Tensor) -> Tensor:
    """In the original, the attention layers are 1x1 convolutions."""
    layer = "attentions" in name and "group_norm" not in name and name.endswith("weight")
    return tensor[:, :, None, None] if layer else tensor


def clip_l(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    bare = {name.removeprefix("text_model."): tensor for name, tensor in tensors.items()}
    return {f"conditioner.embedders.0.transformer.text_model.{name}": tensor for name, tensor in bare.items()}


def open_clip(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = "conditioner.embedders.1.model."
    bare = {name.removeprefix("text_model."): tensor for name, tensor in tensors.items()}
    out = {
        "positional_embedding": bare.pop("embeddings.position_embedding.weight"),
        "token_embedding.weight": bare.pop("embeddings.token_embedding.weight"),
        "ln_final.weight": bare.pop("final_layer_norm.weight"),
        "ln_final.bias": bare.pop("final_layer_norm.bias"),
        "text_projection": bare.pop("text_projection.weight").T.contiguous(),
    }
    for name in [name for name in bare if ".q_proj." in name]:
        end = name.rsplit(".", 1)[1]
        block = name.split(".self_attn")[0].replace("encoder.layers", "transformer.resblocks")
        whole = torch.cat([bare.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"])
        out[f"{block}.attn.in_proj_{end}"] = whole
    for name, tensor in bare.items():
        new = name.replace("encoder.layers", "transformer.resblocks").replace("self_attn.out_proj", "attn.out_proj")
        new = new.replace("layer_norm", "ln_").replace("mlp.fc1", "mlp.c_fc").replace("mlp.fc2", "mlp.c_proj")
        out[new] = tensor
    return {f"{prefix}{name}": tensor.contiguous() for name, tensor in out.items()}


def renamed(tensors: Mapping[str, Tensor], rename: Callable[[str], str]) -> dict[str, Tensor]:
    named = {rename(name): tensor for name, tensor in tensors.items()}
    assert len(named) == len(tensors)
    return named
