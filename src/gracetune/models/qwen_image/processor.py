"""Qwen2-VL's processor for texts and images only.

transformers' own also requires a video processor, which needs torchvision, and torchvision is not available everywhere
torch is. Qwen-Image reads no videos.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen2VLProcessor


class ImageProcessor(Qwen2VLProcessor):
    """Reads the folder of a `Qwen2VLProcessor`, and replaces it in diffusers' pipelines."""

    # transformers derives a processor's parts from the names of these parameters.
    def __init__(
        self, image_processor: Any = None, tokenizer: PreTrainedTokenizerFast | None = None, **others: Any
    ) -> None:
        initialise: Any = super().__init__  # transformers does not annotate it
        initialise(image_processor, tokenizer, chat_template=others.get("chat_template"))
