from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ToolkitNetworkMixin:
    def get_all_modules(self) -> list[Any]:
        return list(self.unet_loras)  # type: ignore[attr-defined]


class LoraModule(nn.Module):
    def __init__(self, lora_name: str, rank: int = 2, width: int = 4) -> None:
        super().__init__()
        self.lora_name = lora_name
        self.lora_down = nn.Linear(width, rank, bias=False)
        self.lora_up = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lora_up(self.lora_down(x))
        return out


class Network(ToolkitNetworkMixin, nn.Module):
    """`$$` for dots while it trains, dots and the original model's names in files."""

    def __init__(self, names: list[str], network_config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network_config = network_config
        self.unet_loras = [LoraModule(name.replace(".", "$$")) for name in names]
        for lora in self.unet_loras:
            self.add_module(lora.lora_name, lora)

    def save_weights(self, file: str, sd: Any, metadata: dict[str, str]) -> None:
        sd.save_lora({_in_file(key): value.clone() for key, value in self.state_dict().items()}, file, metadata)

    def load_weights(self, file: str, sd: Any) -> None:
        self.load_state_dict({_in_memory(key): value for key, value in sd.load_lora(file).items()})


_PAIRS = (
    ("$$", "."), ("transformer.", "diffusion_model."), ("attn1.to_q", "self_attn.q"), ("lora_down", "lora_A"),
    ("lora_up", "lora_B"),
)  # fmt: skip


def _in_file(key: str) -> str:
    for ours, theirs in _PAIRS:
        key = key.replace(ours, theirs, 1) if ours != "$$" else key.replace(ours, theirs)
    return key


def _in_memory(key: str) -> str:
    for ours, theirs in reversed(_PAIRS[1:]):
        key = key.replace(theirs, ours, 1)
    stem, dot, tensor = key.partition(".lora_")
    return stem.replace(".", "$$") + dot + tensor
