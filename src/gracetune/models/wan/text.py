"""Captions as Wan reads them: UMT5's last states of the real tokens. `predict` fills up to 512 with zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from diffusers.utils.import_utils import is_ftfy_available
from torch import Tensor, nn

from gracetune.cache.encoder import EncoderId, Prompt
from gracetune.models.common.encoding import encoder_id, files_digest, release
from gracetune.models.common.pipelines import load_tokenizer
from gracetune.models.source import ModelSource
from gracetune.models.spec import Placement
from gracetune.models.wan.facts import TEXT_TOKENS
from gracetune.models.wan.load import load_umt5

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry

_clean: Callable[[str], str] = prompt_clean
_has_ftfy: Callable[[], bool] = is_ftfy_available


class WanTextEncoder:
    reads_pictures = False

    def __init__(self, model: nn.Module, tokenizer: Any, placement: Placement, identity: EncoderId) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._placement = placement
        self._id = identity

    @property
    def id(self) -> EncoderId:
        return self._id

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt]) -> list[Entry]:
        if not prompts:
            return []
        found = embedded(self._model, self._tokenizer, [prompt.text for prompt in prompts], self._placement.device)
        return [{"prompt_embeds": embeds.to("cpu", self._placement.dtype, copy=True)} for embeds in found]

    def close(self) -> None:
        release([self._model])


def embedded(model: nn.Module, tokenizer: Any, captions: Sequence[str], device: torch.device) -> list[Tensor]:
    """[tokens, width] for each caption."""
    # Always the full length: an embedding's last bits must not depend on the captions it is computed with.
    tokens = tokenizer(
        [_clean(caption) for caption in captions],
        padding="max_length",
        max_length=TEXT_TOKENS,
        truncation=True,
        return_tensors="pt",
    ).to(device)
    states = model(tokens.input_ids, tokens.attention_mask).last_hidden_state
    lengths = tokens.attention_mask.sum(dim=1).tolist()
    return [caption[:length] for caption, length in zip(states, lengths, strict=True)]


def load_text_encoder(source: ModelSource, placement: Placement) -> WanTextEncoder:
    settings = {
        "class": "UMT5EncoderModel, last hidden state",
        "dtype": str(placement.dtype),
        "max length": str(TEXT_TOKENS),
        "tokenizer": files_digest(source.part("tokenizer")),
        # The pipeline mends broken characters only where this package is installed.
        "cleaned by": f"ftfy {version('ftfy')}" if _has_ftfy() else "html and whitespace",
    }
    identity = encoder_id("text", source, ["text_encoder"], settings)
    return WanTextEncoder(load_umt5(source, placement), load_tokenizer(source), placement, identity)
