#!/usr/bin/env python3
"""The layers that ai-toolkit adapts, and what it calls them in the adapter file.

Its own network is built on denoisers of the published sizes on the meta device. Needs gracetune on the import path,
for the sizes:

    PYTHONPATH=src python scripts/peer_vectors/aitoolkit_layers.py --peer CHECKOUT --out .../aitoolkit/layers.json
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from aitoolkit_trainer import model_class
from common import record

from gracetune.models.registry import build_published

LORA = {"type": "lora", "linear": 1}
FLUX, QWEN, SDXL, WAN = ("flux", "dev"), ("qwen_image", "t2i"), ("sdxl", "base-1.0"), ("wan22_14b", "t2v-14b-2.2")
OF_LYCORIS = {"LORA_PREFIX_UNET": "lora_unet", "ENABLE_CONV": True, "MODULE_ALGO_MAP": {}, "NAME_ALGO_MAP": {}}
"""What `LycorisNetwork` of lycoris-lora 1.8.3 has, which ai-toolkit pins; later versions have other names."""
MODELS = (
    FLUX, ("flux", "schnell"), ("flux_kontext", "kontext"), QWEN, ("qwen_image_edit_plus", "edit-2509"), SDXL,
    ("wan21", "t2v-1.3b-2.1"), ("wan21", "t2v-14b-2.1"), ("wan21_i2v", "i2v-14b-480p-2.1"), WAN,
    ("wan22_14b_i2v", "i2v-14b-2.2"), ("wan22_5b", "ti2v-5b-2.2"),
)  # fmt: skip
"""ai-toolkit's arch, and the flavour whose sizes its weights have."""
NETWORKS: dict[tuple[str, str], tuple[dict[str, Any], ...]] = {
    FLUX: (
        *({"type": kind, "linear": 1} for kind in ("lokr", "dora", "loha")),
        *(
            {**LORA, "network_kwargs": {"only_if_contains": words}}
            for words in (
                [f"transformer.single_transformer_blocks.{number}.proj_out" for number in (7, 20)],
                ["proj_out"], ["norm"], ["attn$$to_q"], ["blocks.1"], ["linear", "ff_context"],
            )
        ),
        {**LORA, "network_kwargs": {"ignore_if_contains": ["norm", "single_transformer_blocks.3"]}},
        {**LORA, "network_kwargs": {"only_if_contains": ["attn"], "ignore_if_contains": ["to_out", ".1."]}},
    ),
    QWEN: (
        {"type": "lokr", "linear": 1, "lokr_full_rank": False},
        {**LORA, "network_kwargs": {"only_if_contains": ["img_mod", "txt_mlp.net.2"]}},
    ),
    WAN: ({**LORA, "network_kwargs": {"only_if_contains": ["attn2", "ffn"], "ignore_if_contains": ["blocks.39"]}},),
    SDXL: (
        {**LORA, "conv": 1},
        {"type": "lokr", "linear": 1},
        {"type": "lokr", "linear": 1, "lokr_full_rank": False},
        {"type": "dora", "linear": 1},
        {"type": "locon", "linear": 1},
        {"type": "locon", "linear": 1, "conv": 1},
        {**LORA, "network_kwargs": {"only_if_contains": ["attn2", "proj_in"]}},
        {**LORA, "conv": 1, "network_kwargs": {"only_if_contains": ["resnets.0"], "ignore_if_contains": ["up_blocks"]}},
    ),
}  # fmt: skip


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    plain = [(arch, flavour, LORA) for arch, flavour in MODELS]
    return plain + [(*model, network) for model, networks in NETWORKS.items() for network in networks]


def family_of(arch: str) -> str:
    return "wan" if arch.startswith("wan") else "qwen_image" if arch.startswith("qwen") else arch.partition("_")[0]


def model_of(arch: str, flavour: str) -> Any:
    """ai-toolkit's model object, with denoisers that have shapes and no weights."""
    from toolkit.config_modules import ModelConfig

    config = ModelConfig(name_or_path="none", arch=arch, dtype="fp32")
    model = model_class(arch)("cpu", config, dtype="fp32")
    denoiser = build_published(family_of(arch), flavour)
    if arch.startswith("wan22_14b"):
        from extensions_built_in.diffusion_models.wan22.wan22_14b_model import DualWanTransformer3DModel

        denoiser = DualWanTransformer3DModel(denoiser, build_published("wan", flavour), torch.float32, "cpu")
    model.model = model.unet = denoiser
    return model


def network_on(model: Any, network: dict[str, Any]) -> Any:
    """As `BaseSDTrainProcess` makes it."""
    from toolkit.config_modules import NetworkConfig
    from toolkit.kohya_lora import LoRANetwork
    from toolkit.lora_special import LoRASpecialNetwork

    config = NetworkConfig(**{**network, "network_kwargs": dict(network.get("network_kwargs", {}))})
    options = config.network_kwargs
    kind: Any = LoRASpecialNetwork
    if config.type.lower() == "locon":
        from toolkit.lycoris_special import LycorisSpecialNetwork

        for name, value in OF_LYCORIS.items():
            setattr(LycorisSpecialNetwork, name, value)
        kind = LycorisSpecialNetwork
    elif hasattr(model, "target_lora_modules"):
        options["target_lin_modules"] = model.target_lora_modules
    else:  # the default list grows each time convolutions are requested, and a run has one network
        options["target_lin_modules"] = list(LoRANetwork.UNET_TARGET_REPLACE_MODULE)
    names = model.model_config
    return kind(
        text_encoder=[], unet=model.get_model_to_train(), lora_dim=config.linear, multiplier=1.0,
        alpha=config.linear_alpha, train_unet=True, train_text_encoder=False, conv_lora_dim=config.conv,
        conv_alpha=config.conv_alpha, is_sdxl=names.is_xl, is_flux=names.is_flux, dropout=config.dropout,
        network_config=config, network_type=config.type, transformer_only=config.transformer_only,
        is_transformer=model.is_transformer, base_model=model, **options,
    )  # fmt: skip


def counted(names: Iterable[str]) -> dict[str, Any]:
    """How many, a digest of all, and how often each is there with its block numbers left out."""
    names = sorted(names)
    shapes = Counter(re.sub(r"(?<=[._])[0-9]+(?=[._])", "*", name) for name in names)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    return {"count": len(names), "sha256": digest, "names": dict(sorted(shapes.items()))}


def layers(arch: str, flavour: str, network: dict[str, Any]) -> dict[str, Any]:
    has_file = network is LORA and not arch.startswith("wan22_14b")  # whose file is split in two when it is saved
    location = "cpu" if has_file or network["type"] == "lokr" else "meta"  # LoKr looks at its values when it is made
    with contextlib.redirect_stdout(io.StringIO()), torch.device(location):
        model = model_of(arch, flavour)
        made = network_on(model, network)
        if has_file:
            made.apply_to([], model.get_model_to_train(), False, True)
    paths = {id(module): name for name, module in model.model.named_modules()}
    adapted = [paths[id(one.org_module[0])] for one in made.unet_loras]
    found: dict[str, Any] = {"arch": arch, "flavour": flavour, "network": network}
    if arch.startswith("wan22_14b"):
        for number in (1, 2):
            inside = [name for name in adapted if name.startswith(f"transformer_{number}.")]
            found[f"expert {number}"] = counted(name.partition(".")[2] for name in inside)
    else:
        found["layers"] = counted(adapted)
    if has_file:
        found["file"] = counted(made.get_state_dict(dtype=torch.float32))
    return found


def values(_peer: Path) -> Any:
    import toolkit.models.lokr

    # LoKr multiplies every weight out when it is made, to look for NaN; only its layers are recorded.
    toolkit.models.lokr.make_kron = lambda *factors: torch.zeros(1)
    return [layers(*case) for case in cases()]


if __name__ == "__main__":
    record("layers", values)
