"""Shared by the encoders of all families: their identity, sampling from a posterior, masks, captions as tokens, slicing
and tiling of the VAE, and freeing memory.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gracetune.cache.encoder import EncoderId
from gracetune.data.media.load import Sample
from gracetune.models.fingerprint import fingerprint, without_writers
from gracetune.models.layout import part_tensors, read_config
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions
from gracetune.seeded_random import normals_for_content


class Posterior(Protocol):
    """The output distribution of a diffusers VAE, for images, clips or audio."""

    mean: Tensor
    std: Tensor


def encoder_id(
    kind: Literal["latent", "text"], source: ModelSource, components: Sequence[str], settings: Mapping[str, str]
) -> EncoderId:
    """The identity of an encoder that consists of these parts of a model: weights, configurations and settings."""
    tensors = [tensor for component in components for tensor in part_tensors(source, component)]
    configs = {f"{component} config": _config(source, component) for component in components}
    weights = fingerprint(tensors, source.fingerprints)
    return EncoderId(kind, weights, tuple(sorted({**configs, **settings}.items())))


def _config(source: ModelSource, component: str) -> str:
    return json.dumps(without_writers(read_config(source, component)), sort_keys=True)


def sample_posterior(posterior: Posterior, samples: Sequence[Sample], mode: str) -> Tensor:
    """The posterior's mean, or a sample of it whose randomness depends only on the item's content."""
    if mode == "mean":
        return posterior.mean
    noise = torch.stack([normals_for_content(sample.ref.digest, posterior.mean.shape[1:]) for sample in samples])
    return posterior.mean + posterior.std * noise.to(posterior.mean)


def latent_mask(mask: Tensor, size: Sequence[int]) -> Tensor:
    """A mask [1, H, W] at the size of the latents: each latent pixel has the average weight of its pixels."""
    return F.interpolate(mask[None].float(), tuple(size), mode="area")[0]


def release(modules: Iterable[nn.Module]) -> None:
    """Free the memory of frozen modules, also in torch's GPU cache, even if references to them remain."""
    on_gpu = False
    for module in modules:
        on_gpu |= any(parameter.is_cuda for parameter in module.parameters())
        nn.Module.to(module, "meta")  # the libraries' own `to` reject some models that were placed while loading
        _drop_plain_tensors(module)
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def _drop_plain_tensors(module: nn.Module) -> None:
    """Delete tensors that are neither parameters nor buffers: tables, and weights that weight norm derives."""
    for part in module.modules():
        for name, value in [*vars(part).items()]:
            if isinstance(value, Tensor):
                delattr(part, name)


# -- captions ----------------------------------------------------------------------------------------------------------


class TruncatedTexts:
    """Texts of which the text encoder read only the beginning, without duplicates, by limit (`77 tokens`)."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, None]] = {}

    def add(self, limit: str, texts: Iterable[str]) -> None:
        for text in texts:
            self._found.setdefault(limit, {})[text] = None

    @property
    def by_limit(self) -> Mapping[str, Sequence[str]]:
        return {limit: tuple(texts) for limit, texts in self._found.items()}


def padded_tokens(tokenizer: Any, texts: Sequence[str], length: int, *, special: bool = True) -> tuple[Any, list[int]]:
    """Token ids and attention mask, [B, length] each, and the indices of the texts that were truncated.

    Always padded to the full length, because an embedding must not depend on the other captions of its batch, not even
    in its last bits. Truncation is detected without tokenizing twice: fast tokenizers return the rest as further rows.
    With a slow tokenizer it is not detected, and the list is empty.
    `special`: the tokenizer adds its special tokens, which a rendered chat template already has.
    """
    tokens = tokenizer(
        [*texts],
        padding="max_length",
        max_length=length,
        truncation=True,
        add_special_tokens=special,
        return_overflowing_tokens=tokenizer.is_fast,  # slow tokenizers return it in another form
        return_tensors="pt",
    )
    owners = tokens.pop("overflow_to_sample_mapping", None)
    if owners is None or len(owners) == len(texts):
        return tokens, []
    rows = owners.tolist()
    first = [rows.index(number) for number in range(len(texts))]
    for name in [*tokens]:
        tokens[name] = tokens[name][first]
    return tokens, [number for number, count in Counter(rows).items() if count > 1]


def encoded_by_length(
    tokens: Sequence[Sequence[int]], encode: Callable[[Tensor], Tensor], device: torch.device
) -> list[Tensor]:
    """The embedding of each caption, from calls of `encode` with token ids [B, tokens].

    Only captions with the same number of tokens are batched: padding would change an embedding slightly.
    """
    by_length: dict[int, list[int]] = {}
    for number, own in enumerate(tokens):
        by_length.setdefault(len(own), []).append(number)
    found: dict[int, Tensor] = {}
    for numbers in by_length.values():
        ids = torch.tensor([tokens[number] for number in numbers], device=device)
        found |= zip(numbers, encode(ids), strict=True)
    return [found[number] for number in range(len(tokens))]


_MEASURED = 1024
"""Captions whose tokens are in memory at a time when only their lengths are needed."""


def lengths_in_parts(texts: Sequence[str], tokenize: Callable[[Sequence[str]], Sequence[Sequence[int]]]) -> list[int]:
    """The number of tokens of each text."""
    parts = (texts[first : first + _MEASURED] for first in range(0, len(texts), _MEASURED))
    return [len(own) for part in parts for own in tokenize(part)]


# -- latent encoders ---------------------------------------------------------------------------------------------------


class VaeEncoder:
    """The part of a `cache.encoder.LatentEncoder` that is the same for images, clips and audio."""

    def __init__(self, vae: Any, identity: EncoderId, options: EncodeOptions, others: Sequence[nn.Module] = ()) -> None:
        """`vae` is a diffusers autoencoder. `identity` excludes tiling, which can be switched on later.

        `others` are further models that are freed with the encoder.
        """
        self._vae, self._options = vae, options
        self._identity, self._others = identity, others
        if options.slicing:
            vae.enable_slicing()
        if options.tiling:
            vae.enable_tiling()

    @property
    def id(self) -> EncoderId:
        """Includes tiling: overlapping tiles are blended, which is close to the untiled result but not equal."""
        tiling = ("tiling", "yes" if self._vae.use_tiling else "no")
        return replace(self._identity, settings=tuple(sorted((*self._identity.settings, tiling))))

    def save_memory(self) -> bool:
        """Enable slicing (one sample at a time, same values), then tiling (changes the id). False if both are on."""
        if not self._vae.use_slicing:
            self._vae.enable_slicing()
            return True
        if not self._vae.use_tiling:
            self._vae.enable_tiling()
            return True
        return False

    def close(self) -> None:
        release([self._vae, *self._others])
