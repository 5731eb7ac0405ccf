"""A model of how ComfyUI loads an adapter file, written from its sources. The facts:

* Every weight of the model, `diffusion_model.<name>.weight`, answers to `diffusion_model.<name>` and, with
  underscores, to `lora_unet_<name>`. U-Nets also answer to diffusers' names behind `lora_unet_` and `lycoris_`,
  Qwen-Image to its names behind `transformer.` and `lycoris_`, Z-Image to diffusers' names behind `diffusion_model.`,
  `transformer.` and `lycoris_`, where query, key and value are row ranges of a fused weight, Flux and FLUX.2 to
  diffusers' names behind `transformer.` and `lycoris_`, where query, key, value and (Flux) the feed-forward are row
  ranges of a fused weight and the final norm's halves change places. FLUX.2's names are those of diffusers' converter.
  Krea 2 answers to diffusers' names like Z-Image, and to these alone.
* A layer's tensors are looked for in the order LoRA, LoHa, LoKr, OFT, and differences. LoRA, LoHa: scale alpha / rank,
  or 1 without alpha. LoKr: alpha / rank only if a factor is decomposed, the rank being the second factor's if it is.
  OFT: alpha is a constraint, no alpha is none, rescale is not used. A Kronecker product of 2-d kernels only.
* dora_scale: by rows it divides by the norm of the base weight, by columns by that of the adapted one.
* A key that is not used is only logged. Here it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Target:
    weight: str
    rows: tuple[int, int] | None = None
    """First row and count."""
    halves_swapped: bool = False


def key_map(family: str, weights: Mapping[str, Tensor], diffusers_paths: Mapping[str, str]) -> dict[str, Target]:
    """`weights` in the original layout; `diffusers_paths` gives the original name of the U-Net's layers."""
    found: dict[str, Target] = {}
    for key in weights:
        name = key.removeprefix("diffusion_model.").removesuffix(".weight")
        found[f"lora_unet_{name.replace('.', '_')}"] = found[f"diffusion_model.{name}"] = Target(key)
        if family == "qwen_image":
            found[f"transformer.{name}"] = found[f"lycoris_{name.replace('.', '_')}"] = found[name] = Target(key)
    if family == "sdxl":
        for ours, original in diffusers_paths.items():
            for prefix in ("lora_unet_", "lycoris_"):
                found[prefix + ours.replace(".", "_")] = Target(f"diffusion_model.{original}.weight")
    if family == "z_image":
        for ours, target in _z_image(weights).items():
            for name in (f"diffusion_model.{ours}", f"transformer.{ours}", f"lycoris_{ours.replace('.', '_')}"):
                found[name] = target
    if family == "krea2":
        for ours, original in diffusers_paths.items():
            target = Target(f"diffusion_model.{original}.weight")
            for name in (f"diffusion_model.{ours}", f"transformer.{ours}", f"lycoris_{ours.replace('.', '_')}", ours):
                found[name] = target
    if family in ("flux", "flux2"):
        for ours, target in (_flux if family == "flux" else _flux2)(weights).items():
            for name in (f"transformer.{ours}", f"lycoris_{ours.replace('.', '_')}"):
                found[name] = target
    return found


def _z_image(weights: Mapping[str, Tensor]) -> dict[str, Target]:
    found: dict[str, Target] = {}
    for key, weight in weights.items():
        name = key.removeprefix("diffusion_model.").removesuffix(".weight")
        block, _, layer = name.partition(".attention.")
        if layer == "qkv":
            width = weight.shape[1]
            for part, letter in enumerate("qkv"):
                found[f"{block}.attention.to_{letter}"] = Target(key, (part * width, width))
        elif layer == "out":
            found[f"{block}.attention.to_out.0"] = Target(key)
        elif name == "x_embedder":
            found["all_x_embedder.2-1"] = Target(key)
        elif name.startswith("final_layer."):
            found[name.replace("final_layer.", "all_final_layer.2-1.")] = Target(key)
        else:
            found[name] = Target(key)
    return found


def _flux(weights: Mapping[str, Tensor]) -> dict[str, Target]:
    width = weights["diffusion_model.img_in.weight"].shape[0]
    found: dict[str, Target] = {}
    for key in weights:
        name = key.removeprefix("diffusion_model.").removesuffix(".weight")
        kind, _, rest = name.partition(".")
        number, _, layer = rest.partition(".")
        if kind == "double_blocks":
            ours = f"transformer_blocks.{number}"
            for stream, names in (
                ("img", ("to_q", "to_k", "to_v")),
                ("txt", ("add_q_proj", "add_k_proj", "add_v_proj")),
            ):
                if layer == f"{stream}_attn.qkv":
                    for part, projection in enumerate(names):
                        found[f"{ours}.attn.{projection}"] = Target(key, (part * width, width))
            plain = {
                "img_attn.proj": "attn.to_out.0", "txt_attn.proj": "attn.to_add_out", "img_mod.lin": "norm1.linear",
                "txt_mod.lin": "norm1_context.linear", "img_mlp.0": "ff.net.0.proj", "img_mlp.2": "ff.net.2",
                "txt_mlp.0": "ff_context.net.0.proj", "txt_mlp.2": "ff_context.net.2",
            }  # fmt: skip
            if layer in plain:
                found[f"{ours}.{plain[layer]}"] = Target(key)
        elif kind == "single_blocks":
            ours = f"single_transformer_blocks.{number}"
            if layer == "linear1":
                for part, projection in enumerate(("to_q", "to_k", "to_v")):
                    found[f"{ours}.attn.{projection}"] = Target(key, (part * width, width))
                found[f"{ours}.proj_mlp"] = Target(key, (3 * width, 4 * width))
            else:
                found[f"{ours}.{ {'linear2': 'proj_out', 'modulation.lin': 'norm.linear'}[layer] }"] = Target(key)
    embedders = {"time_in": "timestep", "vector_in": "text", "guidance_in": "guidance"}
    for theirs, ours in embedders.items():
        for number, layer in ((1, "in_layer"), (2, "out_layer")):
            target = Target(f"diffusion_model.{theirs}.{layer}.weight")
            found[f"time_text_embed.{ours}_embedder.linear_{number}"] = target
    found["x_embedder"] = Target("diffusion_model.img_in.weight")
    found["context_embedder"] = Target("diffusion_model.txt_in.weight")
    found["proj_out"] = Target("diffusion_model.final_layer.linear.weight")
    found["norm_out.linear"] = Target("diffusion_model.final_layer.adaLN_modulation.1.weight", halves_swapped=True)
    return found


def _flux2(weights: Mapping[str, Tensor]) -> dict[str, Target]:
    """The rules of diffusers' converter of these weights, the other way around."""
    found: dict[str, Target] = {}
    outside = {
        "img_in": "x_embedder", "txt_in": "context_embedder", "final_layer.linear": "proj_out",
        **{f"{name}.lin": f"{name}.linear"
           for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")},
        **{f"{theirs}_in.{layer}": f"time_guidance_embed.{ours}_embedder.linear_{number}"
           for theirs, ours in (("time", "timestep"), ("guidance", "guidance"))
           for number, layer in ((1, "in_layer"), (2, "out_layer"))},
    }  # fmt: skip
    inside = {
        "img_attn.proj": "attn.to_out.0", "txt_attn.proj": "attn.to_add_out", "img_mlp.0": "ff.linear_in",
        "img_mlp.2": "ff.linear_out", "txt_mlp.0": "ff_context.linear_in", "txt_mlp.2": "ff_context.linear_out",
        "linear1": "attn.to_qkv_mlp_proj", "linear2": "attn.to_out",
    }  # fmt: skip
    parts = {"img_attn.qkv": ("to_q", "to_k", "to_v"), "txt_attn.qkv": ("add_q_proj", "add_k_proj", "add_v_proj")}
    blocks = {"double_blocks": "transformer_blocks", "single_blocks": "single_transformer_blocks"}
    for key, weight in weights.items():
        name = key.removeprefix("diffusion_model.").removesuffix(".weight")
        kind, _, rest = name.partition(".")
        number, _, layer = rest.partition(".")
        if name in outside:
            found[outside[name]] = Target(key)
        elif layer in inside:
            found[f"{blocks[kind]}.{number}.{inside[layer]}"] = Target(key)
        elif layer in parts:
            rows = weight.shape[0] // 3
            for part, projection in enumerate(parts[layer]):
                found[f"{blocks[kind]}.{number}.attn.{projection}"] = Target(key, (part * rows, rows))
    found["norm_out.linear"] = Target("diffusion_model.final_layer.adaLN_modulation.1.weight", halves_swapped=True)
    return found


def load(file: Mapping[str, Tensor], weights: Mapping[str, Tensor], targets: Mapping[str, Target]) -> dict[str, Tensor]:
    """The model's weights with the adapter in them."""
    result = {key: weight.clone() for key, weight in weights.items()}
    used: set[str] = set()
    for name, target in targets.items():
        tensors = {key.removeprefix(f"{name}."): value for key, value in file.items() if key.startswith(f"{name}.")}
        tensors = {suffix: value for suffix, value in tensors.items() if suffix in _SUFFIXES}
        if not tensors:
            continue
        used |= {f"{name}.{suffix}" for suffix in tensors}
        weight = result[target.weight]
        if target.rows is not None:
            weight = weight.narrow(0, *target.rows)
        weight += _change({key: value.float() for key, value in tensors.items()}, weight, target)
    unused = file.keys() - used
    assert not unused, f"lora key not loaded: {sorted(unused)[:5]}"
    return result


_SUFFIXES = {
    "alpha", "dora_scale", "lora_up.weight", "lora_down.weight", "lora_mid.weight", "lora_A.weight", "lora_B.weight",
    *(f"hada_{name}" for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")),
    *(f"lokr_{name}" for name in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")),
    "oft_blocks", "rescale", "diff",
}  # fmt: skip


def _change(tensors: dict[str, Tensor], weight: Tensor, target: Target) -> Tensor:
    alpha = tensors["alpha"].item() if "alpha" in tensors else None
    if "oft_blocks" in tensors:
        change = _oft(tensors["oft_blocks"], alpha or 0.0, weight)
    elif "diff" in tensors:
        assert tensors["diff"].shape == weight.shape
        change = tensors["diff"]
    else:
        change, rank = _product(tensors, weight)
        change = change * (alpha / rank if alpha is not None and rank is not None else 1.0)
    if target.halves_swapped:
        first, second = change.chunk(2)
        change = torch.cat((second, first))
    if "dora_scale" in tensors:
        return _decomposed(tensors["dora_scale"], weight, change)
    return change


def _product(tensors: dict[str, Tensor], weight: Tensor) -> tuple[Tensor, int | None]:
    if "lora_up.weight" in tensors or "lora_B.weight" in tensors:
        up = tensors.get("lora_up.weight", tensors.get("lora_B.weight"))
        down = tensors.get("lora_down.weight", tensors.get("lora_A.weight"))
        assert up is not None
        assert down is not None
        rank = down.shape[0]
        if "lora_mid.weight" in tensors:
            middle = tensors["lora_mid.weight"]
            size = [down.shape[1], down.shape[0], middle.shape[2], middle.shape[3]]
            inner = down.transpose(0, 1).flatten(1) @ middle.transpose(0, 1).flatten(1)
            down = inner.reshape(size).transpose(0, 1)
        return (up.flatten(1) @ down.flatten(1)).reshape(weight.shape), rank
    if "hada_w1_a" in tensors:
        matrices = []
        for number in "12":
            left, right = tensors[f"hada_w{number}_a"], tensors[f"hada_w{number}_b"]
            core = tensors.get(f"hada_t{number}")
            matrices.append(left @ right if core is None else torch.einsum("ijkl,jr,ip->prkl", core, right, left))
        return (matrices[0] * matrices[1]).reshape(weight.shape), tensors["hada_w1_b"].shape[0]
    rank = None
    first = tensors.get("lokr_w1")
    if first is None:
        rank = tensors["lokr_w1_b"].shape[0]
        first = tensors["lokr_w1_a"] @ tensors["lokr_w1_b"]
    second = tensors.get("lokr_w2")
    if second is None:
        left, right = tensors["lokr_w2_a"], tensors["lokr_w2_b"]
        rank = right.shape[0]
        core = tensors.get("lokr_t2")
        second = left @ right if core is None else torch.einsum("ijkl,jr,ip->prkl", core, right, left)
    if second.ndim == 4:
        first = first[:, :, None, None]
    return torch.kron(first, second).reshape(weight.shape), rank


def _oft(blocks: Tensor, constraint: float, weight: Tensor) -> Tensor:
    count, size, _ = blocks.shape
    skew = blocks - blocks.transpose(1, 2)
    if constraint > 0 and skew.norm() > constraint:
        skew = skew * constraint / (skew.norm() + 1e-8)
    one = torch.eye(size)
    turn = (one + skew) @ (one - skew).inverse()
    return torch.einsum("knm,kn...->km...", turn - one, weight.view(count, size, *weight.shape[1:])).reshape(
        weight.shape
    )


def _decomposed(magnitude: Tensor, weight: Tensor, change: Tensor) -> Tensor:
    adapted = weight + change
    if magnitude.shape[0] == weight.shape[0]:
        norm = weight.reshape(weight.shape[0], -1).norm(dim=1).reshape(-1, *(1,) * (weight.ndim - 1))
    else:
        norm = adapted.transpose(0, 1).flatten(1).norm(dim=1).reshape(1, -1, *(1,) * (weight.ndim - 2))
    return adapted * (magnitude / (norm + torch.finfo(torch.float32).eps)) - weight
