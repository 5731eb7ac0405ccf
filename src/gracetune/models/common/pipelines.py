"""diffusers' own pipelines around parts that are already loaded, and text encoders that are such a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from diffusers.utils import logging
from torch import nn
from transformers import AutoTokenizer

from gracetune.cache.encoder import EncoderId, Prompt
from gracetune.errors import ConfigError, Problem
from gracetune.models.bars import without_bars
from gracetune.models.common.encoding import release
from gracetune.models.common.tokens import CutTexts
from gracetune.models.layout import TOKENIZER, read_config
from gracetune.models.source import ModelSource, read_json

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry


def assemble(cls: Any, source: ModelSource, parts: Mapping[str, Any], *, tokenizers: Iterable[str]) -> Any:
    """A pipeline of these parts with the options of the folder; it reads what is not among them itself."""
    for part in tokenizers:
        _check_tokenizer(source, part)
    with without_bars(logging), _refusing(source, "the model's folder"):
        pipeline = cls.from_pretrained(str(source.folder), local_files_only=True, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_tokenizer(source: ModelSource, part: str = "tokenizer", cls: Any = AutoTokenizer) -> Any:
    """Also a processor, which is a tokenizer with more around it; that has a class of its own."""
    _check_tokenizer(source, part)
    with _refusing(source, part):
        return cls.from_pretrained(str(source.part(part)), local_files_only=True)


def _check_tokenizer(source: ModelSource, part: str) -> None:
    """In our words: the libraries fall over a broken file in many ways."""
    read_config(source, part, TOKENIZER)
    file = source.part(part) / "tokenizer.json"
    if file.is_file() and not isinstance(read_json(file).get("model"), dict):
        hint = "download it again"
        raise ConfigError([Problem("model", "no vocabulary", "a tokenizer's model", hint, str(file))])


@contextmanager
def _refusing(source: ModelSource, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        found = f"{what} cannot be read: {str(error).strip().splitlines()[0]}"
        hint = "download the model again, all of it"
        problem = Problem("model.path", found, "a complete model", hint, str(source.folder))
        raise ConfigError([problem]) from error


class PipelineText:
    """A text encoder that is made of the text parts of a pipeline, and of nothing else of it.

    Satisfies `cache.encoder.TextEncoder`, `CutsTexts` and `MeasuresTexts`.
    """

    def __init__(
        self,
        pipeline: Any,
        identity: EncoderId,
        encode: Callable[[Any, torch.device, Sequence[Prompt], CutTexts], list[Entry]],
        *,
        device: torch.device,
        reads_pictures: bool = False,
        lengths: Callable[[Any, Sequence[str]], list[int]] = lambda pipeline, texts: [0] * len(texts),
    ) -> None:
        """`lengths` of texts, where only those of the same one are computed together."""
        self._pipeline, self._identity, self._encode, self._lengths = pipeline, identity, encode, lengths
        self._device, self._reads_pictures = device, reads_pictures
        self._cut = CutTexts()

    @property
    def id(self) -> EncoderId:
        return self._identity

    @property
    def reads_pictures(self) -> bool:
        return self._reads_pictures

    @property
    def cut(self) -> Mapping[str, Sequence[str]]:
        return self._cut.by_limit

    def lengths(self, texts: Sequence[str]) -> list[int]:
        return self._lengths(self._pipeline, texts)

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt]) -> list[Entry]:
        if not prompts:
            return []
        entries = self._encode(self._pipeline, self._device, prompts, self._cut)
        # Copies: an entry must not keep the memory of its whole batch.
        return [{name: tensor.to("cpu", copy=True) for name, tensor in entry.items()} for entry in entries]

    def close(self) -> None:
        release(part for part in self._pipeline.components.values() if isinstance(part, nn.Module))
