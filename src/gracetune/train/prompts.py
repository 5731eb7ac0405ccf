"""Embeddings of the validation prompts, read from the cache that also holds the captions' embeddings.

With them, validation needs no text encoder, which is often the largest part of a pipeline after the denoiser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gracetune.cache.errors import EntriesError
from gracetune.cache.keys import text_key
from gracetune.cache.required_entries import validation_texts
from gracetune.config.run_config import Validation
from gracetune.models.spec import FromEmbeddings, LoadPipeline, ModelFacts, ModelSpec, SampleRequest
from gracetune.train.data import CachedSamples

if TYPE_CHECKING:
    import torch

    from gracetune.cache.encoder import Entry


@dataclass(frozen=True, eq=False)
class Prompts:
    """Cached embeddings of all validation prompts."""

    entries: Mapping[str, Entry]
    """Embeddings by text, on the CPU."""
    from_embeddings: FromEmbeddings

    @property
    def load_pipeline(self) -> LoadPipeline:
        return self.from_embeddings.load_pipeline

    @property
    def reason(self) -> str:
        many = "1 text is" if len(self.entries) == 1 else f"{len(self.entries)} texts are"
        return f"the embeddings of {many} cached, so no text encoder is loaded for them"

    def with_embeddings(self, request: SampleRequest, dtype: torch.dtype) -> SampleRequest:
        """The request with its embeddings, converted to `dtype`, the dtype of the denoiser's inputs.

        The cache holds them in the text encoder's precision, and pipelines pass embeddings on unchanged.
        """
        embeds, negative = (
            {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in entry.items()}
            for entry in (
                self.entries[request.prompt],
                self.entries[request.negative_prompt or self.from_embeddings.default_negative],
            )
        )
        return replace(request, embeds=embeds, negative_embeds=negative)


def prompts_of(validation: Validation, spec: ModelSpec, facts: ModelFacts, cached: CachedSamples) -> Prompts | str:
    """The cached embeddings, or a line that says why validation needs the text encoders."""
    from_embeddings = spec.from_embeddings
    rejection = from_embeddings if isinstance(from_embeddings, str) else from_embeddings.rejection(facts)
    if isinstance(from_embeddings, str) or rejection is not None:
        return f"text encoders are loaded for them: {rejection}"
    texts = validation_texts(validation, default_negative=from_embeddings.default_negative)
    try:
        return Prompts({text: _read(cached, text) for text in texts}, from_embeddings)
    except EntriesError as error:  # missing, or damaged
        return f"text encoders are loaded for them: {error}"


def _read(cached: CachedSamples, text: str) -> Entry:
    key = text_key(text, cached.keys.text)
    found = cached.texts.look_up(key)
    entry = cached.texts.read(key) if found is None else found
    return {name: tensor.to("cpu", copy=True) for name, tensor in entry.items()}
