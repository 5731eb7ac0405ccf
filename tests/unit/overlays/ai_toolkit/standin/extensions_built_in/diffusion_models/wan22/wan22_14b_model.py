from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from safetensors.torch import load_file, save_file


class Wan2214bModel:
    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.is_multistage = True
        self.train_high_noise = kwargs.get("train_high_noise", True)
        self.train_low_noise = kwargs.get("train_low_noise", True)
        self.network: Any = None
        self.network_config = SimpleNamespace(split_multistage_loras=kwargs.get("split", True))

    def layers(self) -> list[str]:
        both = self.train_high_noise and self.train_low_noise
        experts = ("transformer_1.", "transformer_2.") if both else ("",)
        return [f"transformer.{expert}blocks.{block}.attn1.to_q" for expert in experts for block in (0, 1)]

    def save_lora(self, state_dict: Any, output_path: Any, metadata: Any = None) -> None:
        """Both experts in one file, whatever was requested: only the overlay parts them here."""
        save_file(state_dict, output_path, metadata=metadata)

    def load_lora(self, file: Any) -> Any:
        return load_file(file)
