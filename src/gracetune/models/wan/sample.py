"""Generating clips and images with diffusers' own pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from PIL import ImageOps

from gracetune.errors import Problem
from gracetune.models.common.sample_checks import batched, reject, side_problems
from gracetune.models.spec import ModelFacts, Sampled, SampleRequest
from gracetune.models.wan.encode import embedded
from gracetune.models.wan.load import FROM_IMAGE, FROM_TEXT, PIPELINES
from gracetune.models.wan.predict import padded

_WIDTH, _HEIGHT = 832, 480
_FPS, _FPS_5B = 16.0, 24.0
_GUIDANCE = 5.0
_GUIDANCE_TWO_EXPERTS = {FROM_TEXT: (4.0, 3.0), FROM_IMAGE: (3.5, 3.5)}
"""Guidance of the high-noise and low-noise expert, as published with the 2.2 weights."""


def check_sample(request: SampleRequest, facts: ModelFacts) -> None:
    known = facts.details
    starts_from_image = known["pipeline"] == FROM_IMAGE or bool(known["expand_timesteps"] and request.references)
    reject(_problems(request, known["side_multiple"], known["frame_step"], starts_from_image=starts_from_image))


@torch.no_grad()
def sample(pipeline: Any, request: SampleRequest) -> Sampled:
    """Frames of the requested size. Image-to-video weights start from the first reference; the 5B can."""
    pipeline = _matching_pipeline(pipeline, request)
    multiple = pipeline.vae_scale_factor_spatial * pipeline.transformer.config.patch_size[1]
    step, starts_from_image = pipeline.vae_scale_factor_temporal, _takes_image(pipeline)
    reject(_problems(request, multiple, step, starts_from_image=starts_from_image))
    width, height = _size(request)
    options: dict[str, Any] = dict(_guidance(pipeline, request.guidance))
    if starts_from_image:
        # Cropped to the aspect ratio, as training data is; the pipeline would stretch it.
        options["image"] = ImageOps.fit(request.references[0].convert("RGB"), (width, height))
    pipeline.set_progress_bar_config(disable=True)
    clips = pipeline(
        prompt_embeds=_caption(pipeline, request.prompt, request.embeds),
        negative_prompt_embeds=_caption(pipeline, request.negative_prompt, request.negative_embeds),
        width=width,
        height=height,
        num_frames=request.frames,
        num_inference_steps=request.steps,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="pil",
        **options,
    ).frames
    fps = _FPS_5B if pipeline.config.expand_timesteps else _FPS
    return Sampled(frames=tuple(clips[0]), fps=fps if request.frames > 1 else None)


def _matching_pipeline(pipeline: Any, request: SampleRequest) -> Any:
    """The pipeline for this request. The 5B's folder names the text pipeline; the image pipeline uses the same
    parts."""
    if not (pipeline.config.expand_timesteps and request.references) or _takes_image(pipeline):
        return pipeline
    return PIPELINES[FROM_IMAGE](**pipeline.components, expand_timesteps=True)


def _takes_image(pipeline: Any) -> bool:
    return isinstance(pipeline, PIPELINES[FROM_IMAGE])


def _caption(pipeline: Any, text: str, entry: Mapping[str, torch.Tensor] | None) -> torch.Tensor:
    """Encoded as in training, for both pipelines: diffusers' image pipeline cannot clean a text without ftfy."""
    if entry is not None:
        return padded(batched(pipeline, entry)["prompt_embeds"])
    encoder = pipeline.text_encoder
    (embeds,) = embedded(encoder, pipeline.tokenizer, [text], encoder.device)
    return padded(embeds[None])


def _guidance(pipeline: Any, requested: float | None) -> dict[str, float]:
    if pipeline.config.boundary_ratio is None:
        return {"guidance_scale": _GUIDANCE if requested is None else requested}
    own = _GUIDANCE_TWO_EXPERTS[FROM_IMAGE if _takes_image(pipeline) else FROM_TEXT]
    high, low = own if requested is None else (requested, requested)
    return {"guidance_scale": high, "guidance_scale_2": low}


def _size(request: SampleRequest) -> tuple[int, int]:
    return request.width or _WIDTH, request.height or _HEIGHT


def _problems(request: SampleRequest, multiple: int, step: int, *, starts_from_image: bool) -> Iterator[Problem]:
    """Values that the pipeline would round, or reject with an error of its own."""
    yield from side_problems(*_size(request), multiple)
    if request.frames < 1 or (request.frames - 1) % step:
        near = max(0, round((request.frames - 1) / step)) * step + 1
        yield Problem("num_frames", str(request.frames), f"{step} k + 1 frames", str(near))
    if starts_from_image and not request.references:
        expected = "an image: these weights continue a first frame"
        yield Problem("references", "none", expected, "give the path of an image")
    if request.references and (not starts_from_image or len(request.references) > 1):
        expected = "1: the first frame" if starts_from_image else "none: these weights have no image-to-video mode"
        hint = "remove the others" if starts_from_image else "remove them"
        yield Problem("references", f"{len(request.references)} images", expected, hint)
