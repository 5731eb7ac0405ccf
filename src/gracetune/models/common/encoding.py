"""Shared by the encoders of all families: their identity, sampling from a posterior, masks, and freeing memory."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gracetune.cache.encoder import EncoderId
from gracetune.data.media.load import Sample
from gracetune.models.fingerprint import fingerprint, without_writers
from gracetune.models.layout import part_tensors, read_config
from gracetune.models.source import ModelSource
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
