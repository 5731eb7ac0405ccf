"""Qwen2-VL's processor for texts and pictures alone.

transformers' own also insists on a video processor, which needs torchvision, and torchvision is not everywhere torch
is. Nothing in Qwen-Image reads a video.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen2VLProcessor


class PictureProcessor(Qwen2VLProcessor):
    """Reads the folder of a `Qwen2VLProcessor`, and stands in for it in diffusers' pipelines."""

    # transformers takes the parts a processor has from the names of these parameters.
    def __init__(
        self, image_processor: Any = None, tokenizer: PreTrainedTokenizerFast | None = None, **others: Any
    ) -> None:
        initialise: Any = super().__init__  # transformers does not annotate it
        initialise(image_processor, tokenizer, chat_template=others.get("chat_template"))
