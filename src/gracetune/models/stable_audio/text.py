"""Captions as Stable Audio reads them: T5's states of the real tokens, projected. `predict` puts zeros after them.

The empty caption is a single row of zeros. In place of what T5 makes of no words, because that is what the weights were
trained with when a caption was dropped, and what the pipeline guides away from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gracetune.cache.encoder import EncoderId, Prompt
from gracetune.models.common.encoding import encoder_id, files_digest, release
from gracetune.models.common.pipelines import load_tokenizer
from gracetune.models.source import ModelSource
from gracetune.models.spec import Placement
from gracetune.models.stable_audio.facts import inspect
from gracetune.models.stable_audio.load import load_projection, load_t5

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry


class StableAudioTextEncoder:
    reads_pictures = False

    def __init__(
        self,
        model: nn.Module,
        projection: Any,
        tokenizer: Any,
        tokens: int,
        placement: Placement,
        identity: EncoderId,
    ) -> None:
        self._model = model
        self._projection = projection
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._placement = placement
        self._id = identity

    @property
    def id(self) -> EncoderId:
        return self._id

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt]) -> list[Entry]:
        if not prompts:
            return []
        # Always the full length: an embedding's last bits must not depend on the captions it is computed with.
        tokens = self._tokenizer(
            [prompt.text for prompt in prompts],
            padding="max_length",
            max_length=self._tokens,
            truncation=True,
            return_tensors="pt",
        ).to(self._placement.device)
        states = self._model(tokens.input_ids, attention_mask=tokens.attention_mask)[0]
        states = self._projection(text_hidden_states=states).text_hidden_states.to("cpu", self._placement.dtype)
        lengths = tokens.attention_mask.sum(dim=1).tolist()
        return [
            {"prompt_embeds": _entry(prompt, embeds[:length])}
            for prompt, embeds, length in zip(prompts, states, lengths, strict=True)
        ]

    def close(self) -> None:
        release([self._model, self._projection])


def _entry(prompt: Prompt, embeds: Tensor) -> Tensor:
    return embeds.clone() if prompt.text.strip() else torch.zeros_like(embeds[:1])


def load_text_encoder(source: ModelSource, placement: Placement) -> StableAudioTextEncoder:
    tokens: int = inspect(source).details["text_tokens"]
    settings = {
        "class": "T5EncoderModel, StableAudioProjectionModel",
        "dtype": str(placement.dtype),
        "max length": str(tokens),
        "tokenizer": files_digest(source.part("tokenizer")),
        "empty caption": "zeros",
    }
    identity = encoder_id("text", source, ["text_encoder", "projection_model"], settings)
    return StableAudioTextEncoder(
        load_t5(source, placement),
        load_projection(source, placement),
        load_tokenizer(source),
        tokens,
        placement,
        identity,
    )
