"""Qwen3-VL's processor for texts and images only: transformers' own also requires torchvision, for videos.

Captioning uses it, and so can families whose text encoder reads images.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen3VLProcessor


class Qwen3ImageProcessor(Qwen3VLProcessor):
    """Reads the folder of a `Qwen3VLProcessor`."""

    # transformers derives a processor's parts from the names of these parameters.
    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: PreTrainedTokenizerFast | None = None,
        chat_template: str | None = None,
        **_others: Any,
    ) -> None:
        initialize: Any = super().__init__  # transformers does not annotate it
        initialize(image_processor, tokenizer, chat_template=chat_template)
