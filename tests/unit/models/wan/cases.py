"""Wan flavours whose denoisers have different inputs, with samples for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline, WanPipeline
from PIL import Image
from torch import Tensor, nn

from gracetune.cache.collate import collate
from gracetune.cache.encoder import Prompt
from gracetune.data.media.load import Sample, to_pixels
from gracetune.data.refs import Bucket, CaptionRef, Clip, Fit, SampleRef
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, PartPlacement
from unit.models.loaded import latent_encoder, text_encoder

CPU = PartPlacement(torch.device("cpu"), torch.float32)
TinyModel = Callable[[str, str], Path]


@dataclass(frozen=True)
class Case:
    flavour: str
    from_image: bool = False
    size: tuple[int, int] = (48, 32)
    """Width and height. Not square, so that swapping them is detected."""
    frames: int = 5

    def __str__(self) -> str:
        return f"{self.flavour}-{'image' if self.from_image else 'text'}"

    @property
    def options(self) -> EncodeOptions:
        return EncodeOptions(image_to_video=self.from_image)


CASES = (
    Case("t2v-14b-2.2"),
    Case("i2v-14b-2.2", from_image=True, frames=9),
    Case("ti2v-5b-2.2", size=(96, 64)),
    Case("ti2v-5b-2.2", from_image=True, size=(64, 96), frames=9),
    Case("t2v-1.3b-2.1"),
    Case("i2v-14b-480p-2.1", from_image=True),
)

BY_VAE = tuple(pytest.param(case, marks=[] if case in (CASES[0], CASES[2]) else pytest.mark.full) for case in CASES)
"""One case per VAE, for the daily tests."""


def source_of(tiny_model: TinyModel, flavour: str) -> ModelSource:
    return ModelSource(name=flavour, folder=tiny_model("wan", flavour))


def image(size: tuple[int, int], seed: int = 0) -> Image.Image:
    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def clip(size: tuple[int, int], frames: int = 5, seed: int = 0, mask: Tensor | None = None) -> Sample:
    """A clip whose first frame is `image(size, seed)`; frames=1 gives an image."""
    pixels = to_pixels([image(size, seed + 100 * number) for number in range(frames)])
    ref = SampleRef(
        dataset="clips",
        path=f"{seed}.mp4",
        digest=f"{seed:032x}",
        bucket=Bucket(*size, frames),
        fit=Fit(size, size),
        caption=CaptionRef("a cat"),
        clip=Clip(0.0, frames / 16, 16.0) if frames > 1 else None,
    )
    return Sample(ref, pixels if frames > 1 else pixels[:, 0], None, mask, ())


def pipeline_of(source: ModelSource, case: Case) -> Any:
    """diffusers' own loading, without our code."""
    pipeline = DiffusionPipeline.from_pretrained(str(source.folder), local_files_only=True)
    if case.from_image and not isinstance(pipeline, WanImageToVideoPipeline):
        pipeline = WanImageToVideoPipeline(**pipeline.components, expand_timesteps=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@dataclass(frozen=True)
class Call:
    component: str
    requested: Mapping[str, Any]
    answer: Tensor


def record(pipeline: Any) -> list[Call]:
    """Records all later denoiser calls of the pipeline."""
    calls: list[Call] = []
    for component in ("transformer", "transformer_2"):
        module: nn.Module | None = getattr(pipeline, component)
        if module is None:
            continue

        def note(_module: Any, _args: Any, requested: Any, answer: Any, component: str = component) -> None:
            calls.append(Call(component, requested, answer[0]))

        module.register_forward_hook(note, with_kwargs=True)
    return calls


def texts_of(pipeline: Any) -> WanPipeline:
    """diffusers' pipeline for images cleans no text unless ftfy is installed; the one for text does, the same way."""
    if isinstance(pipeline, WanPipeline):
        return pipeline
    parts = {name: part for name, part in pipeline.components.items() if not name.startswith("image_")}
    return WanPipeline(**parts)


def run(pipeline: Any, case: Case, *, prompt: str, negative_prompt: str | None = None, **options: Any) -> Any:
    with torch.no_grad():
        wanted, avoided = texts_of(pipeline).encode_prompt(
            prompt, negative_prompt, do_classifier_free_guidance=negative_prompt is not None, max_sequence_length=512
        )
    options |= {"prompt_embeds": wanted, "negative_prompt_embeds": avoided}
    if case.from_image:
        options["image"] = image(case.size)
    return pipeline(
        width=case.size[0],
        height=case.size[1],
        num_frames=case.frames,
        generator=torch.Generator().manual_seed(0),
        **options,
    ).frames


def entries(source: ModelSource, case: Case, sample: Sample, *captions: str) -> list[dict[str, Tensor]]:
    """One batch of size 1 for each caption."""
    latents = latent_encoder("wan", source.folder, case.options).encode([sample])[0]
    texts = text_encoder("wan", source.folder).encode([Prompt(caption) for caption in captions])
    return [{name: part[None] for name, part in {**latents, **text}.items()} for text in texts]


def batched(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collated as the batch source does."""
    entries = [{name: part[0] for name, part in batch.items()} for batch in batches]
    return {name: one.build() for name, one in collate(entries, [str(n) for n in range(len(entries))]).items()}
