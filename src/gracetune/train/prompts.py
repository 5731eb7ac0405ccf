"""Embeddings of the validation's prompts, out of the cache that training reads its captions from.

With them samples are drawn without a text encoder, which is often the largest part of a pipeline beside its denoiser.
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
from gracetune.train.data import Ready

if TYPE_CHECKING:
    import torch

    from gracetune.cache.encoder import Entry


@dataclass(frozen=True, eq=False)
class Prompts:
    entries: Mapping[str, Entry]
    """By text; on the CPU."""
    how: FromEmbeddings

    @property
    def load_pipeline(self) -> LoadPipeline:
        return self.how.load_pipeline

    @property
    def reason(self) -> str:
        many = "1 text is" if len(self.entries) == 1 else f"{len(self.entries)} texts are"
        return f"the embeddings of {many} cached, so no text encoder is loaded for them"

    def given(self, request: SampleRequest, dtype: torch.dtype) -> SampleRequest:
        """`dtype` is what the denoiser is given. Pipelines hand embeddings on as they are, and these were cached in the
        precision of the computation, which may be another one."""
        embeds, negative = (
            {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in entry.items()}
            for entry in (self.entries[request.prompt], self.entries[request.negative_prompt or self.how.no_wish])
        )
        return replace(request, embeds=embeds, negative_embeds=negative)


def prompts_of(validation: Validation, spec: ModelSpec, facts: ModelFacts, ready: Ready) -> Prompts | str:
    """Or why samples need the text encoder, in words."""
    how = spec.from_embeddings
    refusal = how if isinstance(how, str) else how.refusal(facts)
    if isinstance(how, str) or refusal is not None:
        return f"text encoders are loaded for them: {refusal}"
    texts = validation_texts(validation, no_wish=how.no_wish)
    try:
        return Prompts({text: _read(ready, text) for text in texts}, how)
    except EntriesError as error:  # missing, or damaged
        return f"text encoders are loaded for them: {error}"


def _read(ready: Ready, text: str) -> Entry:
    key = text_key(text, ready.keys.text)
    found = ready.texts.look_up(key)
    entry = ready.texts.read(key) if found is None else found
    return {name: tensor.to("cpu", copy=True) for name, tensor in entry.items()}
