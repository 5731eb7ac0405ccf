"""diffusers' own pipelines around loaded parts, and text encoders that consist of such a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from diffusers.utils import logging
from torch import nn
from transformers import AutoTokenizer

from gracetune.cache.encoder import EncoderId, Prompt
from gracetune.errors import ConfigError, Problem
from gracetune.models.common.encoding import TruncatedTexts, release
from gracetune.models.common.sample_checks import size_of
from gracetune.models.layout import TOKENIZER, read_config
from gracetune.models.progress_bars import without_bars
from gracetune.models.source import ModelSource, read_json
from gracetune.models.spec import Sampled, SampleRequest

if TYPE_CHECKING:
    from gracetune.cache.encoder import Entry

UNGUIDED = 1.0
"""`guidance` without an effect, in all families."""


def assemble(cls: Any, source: ModelSource, parts: Mapping[str, Any], *, tokenizers: Iterable[str]) -> Any:
    """A pipeline of class `cls` with the folder's options. `parts` are parts that are loaded already, or None for
    parts that are not needed; diffusers loads the others. The files of `tokenizers` are checked first."""
    for part in tokenizers:
        _check_tokenizer(source, part)
    with without_bars(logging), _config_errors(source, "the model's folder"):
        pipeline = cls.from_pretrained(str(source.folder), local_files_only=True, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate_image(pipeline: Any, request: SampleRequest, **options: Any) -> Sampled:
    """The image of a request. The caller has checked it; `options` are those of the family's pipeline."""
    width, height = size_of(request)
    output = pipeline(
        width=width,
        height=height,
        num_inference_steps=request.steps,
        generator=torch.Generator().manual_seed(request.seed),
        **options,
    )
    return Sampled(frames=tuple(output.images))


def guidance_from_zero(request: SampleRequest, *, distilled: bool) -> dict[str, Any]:
    """`guidance_scale` of a pipeline that counts guidance from 0, where ours counts from 1. Distilled weights are not
    guided unless the request sets some."""
    guidance = UNGUIDED if request.guidance is None and distilled else request.guidance
    if guidance is None:
        return {}
    if guidance <= UNGUIDED and request.negative_prompt:
        warnings.warn(f"negative_prompt: no effect with guidance {guidance:g}", stacklevel=3)
    return {"guidance_scale": max(0.0, guidance - UNGUIDED)}


def load_tokenizer(source: ModelSource, part: str = "tokenizer", cls: Any = AutoTokenizer) -> Any:
    """Load a tokenizer, or a processor of class `cls`, which contains one."""
    _check_tokenizer(source, part)
    with _config_errors(source, part):
        return cls.from_pretrained(str(source.part(part)), local_files_only=True)


def _check_tokenizer(source: ModelSource, part: str) -> None:
    """Report a broken tokenizer file with our message: the libraries fail in many different ways."""
    read_config(source, part, TOKENIZER)
    file = source.part(part) / "tokenizer.json"
    if file.is_file() and not isinstance(read_json(file).get("model"), dict):
        hint = "download it again"
        raise ConfigError([Problem("model", "no vocabulary", "a tokenizer's model", hint, str(file))])


@contextmanager
def _config_errors(source: ModelSource, what: str) -> Iterator[None]:
    """Turn the libraries' exceptions for broken files into ConfigError."""
    try:
        yield
    except (OSError, ValueError) as error:
        found = f"{what} cannot be read: {str(error).strip().splitlines()[0]}"
        hint = "download the whole model again"
        problem = Problem("model.path", found, "a complete model", hint, str(source.folder))
        raise ConfigError([problem]) from error


class PipelineText:
    """A text encoder that consists of the text parts of a pipeline, without its other parts.

    Satisfies `cache.encoder.TextEncoder`, `ReportsTruncation` and `MeasuresTexts`.
    """

    def __init__(
        self,
        pipeline: Any,
        identity: EncoderId,
        encode: Callable[[Any, torch.device, Sequence[Prompt], TruncatedTexts], list[Entry]],
        *,
        device: torch.device,
        reads_images: bool = False,
        lengths: Callable[[Any, Sequence[str]], list[int]] = lambda pipeline, texts: [0] * len(texts),
    ) -> None:
        """`lengths` returns the token counts of texts, for encoders that only batch texts of equal length. The default
        makes all lengths equal."""
        self._pipeline, self._identity, self._encode, self._lengths = pipeline, identity, encode, lengths
        self._device, self._reads_images = device, reads_images
        self._truncated = TruncatedTexts()

    @property
    def id(self) -> EncoderId:
        return self._identity

    @property
    def reads_images(self) -> bool:
        return self._reads_images

    @property
    def truncated(self) -> Mapping[str, Sequence[str]]:
        """Truncated texts, by the limit that cut them."""
        return self._truncated.by_limit

    def lengths(self, texts: Sequence[str]) -> list[int]:
        return self._lengths(self._pipeline, texts)

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt]) -> list[Entry]:
        if not prompts:
            return []
        entries = self._encode(self._pipeline, self._device, prompts, self._truncated)
        # Copies, so that an entry does not keep the whole batch's memory alive.
        return [{name: tensor.to("cpu", copy=True) for name, tensor in entry.items()} for entry in entries]

    def close(self) -> None:
        release(part for part in self._pipeline.components.values() if isinstance(part, nn.Module))
