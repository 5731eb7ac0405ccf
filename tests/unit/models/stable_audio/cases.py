"""Audio samples, and diffusers' own pipeline on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from gracetune.cache.collate import collate
from gracetune.cache.encoder import Prompt
from gracetune.data.media.load import Sample
from gracetune.data.refs import Bucket, CaptionRef, Clip, SampleRef
from gracetune.models.layout import SCHEDULER, read_config
from gracetune.models.source import ModelSource
from gracetune.models.spec import PartPlacement
from gracetune.models.stable_audio.predict import solver_from
from unit.models.loaded import latent_encoder, text_encoder

CPU = PartPlacement(torch.device("cpu"), torch.float32)
TinyModel = Callable[[str, str], Path]
RATE, HOP = 44_100, 2048


def source_of(tiny_model: TinyModel) -> ModelSource:
    return ModelSource("tiny", tiny_model("stable_audio", "open-1.0"))


def sound(columns: int = 8, seed: int = 0, *, start: float = 0.0, silent: int = 0, pad: bool = False) -> Sample:
    """Noise with the length of this many latent columns. The last `silent` audio samples are zeros."""
    length = columns * HOP
    audio = torch.rand(2, length, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    audio[:, length - silent :] = 0
    ref = SampleRef(
        dataset="sounds",
        path=f"{seed}.wav",
        digest=f"{seed:032x}",
        bucket=Bucket(audio_samples=length, audio_channels=2),
        fit=None,
        caption=CaptionRef("a dog"),
        clip=Clip(start, length / RATE, sample_rate=RATE, pad=pad),
    )
    return Sample(ref, None, audio, None, ())


def pipeline_of(source: ModelSource) -> Any:
    """diffusers' own loading, with our solver, which passes the model time the weights were trained with."""
    solver = solver_from(read_config(source, "scheduler", SCHEDULER))
    pipeline = DiffusionPipeline.from_pretrained(str(source.folder), scheduler=solver, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@dataclass(frozen=True)
class Call:
    states: Tensor
    time: Tensor
    requested: Mapping[str, Any]
    answer: Tensor


def record(module: nn.Module) -> list[Call]:
    calls: list[Call] = []

    def note(_module: Any, args: Any, requested: Any, answer: Any) -> None:
        calls.append(Call(args[0], args[1], requested, answer[0]))

    module.register_forward_hook(note, with_kwargs=True)
    return calls


def entries(source: ModelSource, sample: Sample, *captions: str) -> list[dict[str, Tensor]]:
    """One batch of size 1 for each caption."""
    latents = latent_encoder("stable_audio", source.folder).encode([sample])[0]
    texts = text_encoder("stable_audio", source.folder).encode([Prompt(caption) for caption in captions])
    return [{name: part[None] for name, part in {**latents, **text}.items()} for text in texts]


def batched(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collated as the batch source does."""
    entries = [{name: part[0] for name, part in batch.items()} for batch in batches]
    return {name: one.build() for name, one in collate(entries, [str(n) for n in range(len(entries))]).items()}
