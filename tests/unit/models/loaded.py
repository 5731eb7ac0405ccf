"""Parts of the tiny models that many tests share without changing them, loaded once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from gracetune.cache.encoder import LatentEncoder, TextEncoder
from gracetune.models.registry import spec_of
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, PartPlacement

CPU = PartPlacement(torch.device("cpu"), torch.float32)


@cache
def latent_encoder(family: str, folder: Path, options: EncodeOptions = EncodeOptions()) -> LatentEncoder:  # noqa: B008
    return spec_of(family).load_latent_encoder(ModelSource("tiny", folder), CPU, options)


@cache
def text_encoder(family: str, folder: Path) -> TextEncoder:
    return spec_of(family).load_text_encoder(ModelSource("tiny", folder), CPU)


@cache
def pipeline(family: str, folder: Path) -> Any:
    return spec_of(family).load_pipeline(ModelSource("tiny", folder), {}, CPU)
