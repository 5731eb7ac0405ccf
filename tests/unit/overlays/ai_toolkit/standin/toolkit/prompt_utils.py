from __future__ import annotations

from safetensors.torch import load_file
from torch import Tensor


class PromptEmbeds:
    def __init__(self, text_embeds: Tensor) -> None:
        self.text_embeds = text_embeds

    @classmethod
    def load(cls, path: str) -> PromptEmbeds:
        return cls(load_file(path, device="cpu")["text_embed"])
