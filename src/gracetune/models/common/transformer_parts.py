"""Loading of families that have one transformer, a VAE and text encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from gracetune.models.common.pipelines import assemble
from gracetune.models.loading import build_component, load_component
from gracetune.models.source import ModelSource
from gracetune.models.spec import Expert, ModelFacts, PartPlacement

TRANSFORMER = "transformer"
"""The folder of the denoiser."""


@dataclass(frozen=True)
class TransformerParts:
    """The classes of a family's parts. Its methods are functions of `ModelSpec`."""

    transformer: Any
    vae: Any
    pipeline: Callable[[ModelSource, ModelFacts | None], Any]
    """diffusers' pipeline class for a folder. None: the facts are those of the folder."""
    load_texts: Callable[[ModelSource, PartPlacement], Mapping[str, Any]]
    """The text encoders, and what else the pipeline encodes texts with."""
    text_encoders: tuple[str, ...] = ("text_encoder",)
    tokenizers: tuple[str, ...] = ("tokenizer",)
    adjust: Callable[[nn.Module], None] | None = None
    """As in `ModelSpec`."""

    def load_denoiser(self, source: ModelSource, expert: Expert, placement: PartPlacement) -> nn.Module:
        return load_component(source, expert.component, self.transformer, placement, adjust=self.adjust)

    def build_denoiser(self, source: ModelSource, expert: Expert) -> nn.Module:
        return build_component(source, expert.component, self.transformer, adjust=self.adjust)

    def load_vae(self, source: ModelSource, placement: PartPlacement) -> nn.Module:
        return load_component(source, "vae", self.vae, replace(placement, attention=None))

    def load_pipeline(
        self, source: ModelSource, denoisers: Mapping[str, nn.Module], placement: PartPlacement,
        facts: ModelFacts | None = None,
    ) -> Any:  # fmt: skip
        """A denoiser that is not given is loaded."""
        return self._around(source, denoisers, placement, facts, self.load_texts(source, placement))

    def load_pipeline_without_text(
        self, source: ModelSource, denoisers: Mapping[str, nn.Module], placement: PartPlacement,
        facts: ModelFacts | None = None,
    ) -> Any:  # fmt: skip
        """For samples from cached embeddings (`FromEmbeddings`)."""
        return self._around(source, denoisers, placement, facts, dict.fromkeys(self.text_encoders))

    def text_pipeline(self, source: ModelSource, placement: PartPlacement) -> Any:
        """The pipeline with nothing but what it encodes texts with."""
        parts = {"vae": None, "scheduler": None, TRANSFORMER: None, **self.load_texts(source, placement)}
        return self._assemble(source, parts, None)

    def _around(
        self, source: ModelSource, denoisers: Mapping[str, nn.Module], placement: PartPlacement,
        facts: ModelFacts | None, texts: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        parts = {"vae": self.load_vae(source, placement), **texts, **denoisers}
        if TRANSFORMER not in denoisers:
            parts[TRANSFORMER] = self.load_denoiser(source, Expert("", TRANSFORMER), placement)
        return self._assemble(source, parts, facts)

    def _assemble(self, source: ModelSource, parts: Mapping[str, Any], facts: ModelFacts | None) -> Any:
        """diffusers' pipeline of these parts. It reads the missing ones (tokenizers, scheduler) itself."""
        return assemble(self.pipeline(source, facts), source, parts, tokenizers=self.tokenizers)
