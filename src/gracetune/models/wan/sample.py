"""Clips and pictures drawn by diffusers' own pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from PIL import ImageOps

from gracetune.errors import ConfigError, Problem
from gracetune.models.common.sampling import batched
from gracetune.models.spec import Sampled, SampleRequest
from gracetune.models.wan.facts import FROM_IMAGE, FROM_TEXT
from gracetune.models.wan.load import PIPELINES
from gracetune.models.wan.predict import padded
from gracetune.models.wan.text import embedded

_WIDTH, _HEIGHT = 832, 480
_FPS, _FPS_5B = 16.0, 24.0
_GUIDANCE = 5.0
_GUIDANCE_TWO_EXPERTS = {FROM_TEXT: (4.0, 3.0), FROM_IMAGE: (3.5, 3.5)}
"""High and low noise, as the 2.2 weights are published with."""


@torch.no_grad()
def sample(pipeline: Any, request: SampleRequest) -> Sampled:
    """Frames of the asked-for size. Image-to-video weights start from the first reference; the 5B may."""
    pipeline = _that_takes(pipeline, request)
    width, height = request.width or _WIDTH, request.height or _HEIGHT
    _check(pipeline, request, width, height)
    options: dict[str, Any] = dict(_guidance(pipeline, request.guidance))
    if _takes_picture(pipeline):
        # Cut to shape as the data is; the pipeline would stretch it.
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


def _that_takes(pipeline: Any, request: SampleRequest) -> Any:
    """The 5B's folder names the text pipeline; with a picture the same parts work in the other one."""
    if not (pipeline.config.expand_timesteps and request.references) or _takes_picture(pipeline):
        return pipeline
    return PIPELINES[FROM_IMAGE](**pipeline.components, expand_timesteps=True)


def _takes_picture(pipeline: Any) -> bool:
    return isinstance(pipeline, PIPELINES[FROM_IMAGE])


def _caption(pipeline: Any, text: str, entry: Mapping[str, torch.Tensor] | None) -> torch.Tensor:
    """As in training, whichever pipeline it is: diffusers' one for pictures cannot clean a text without ftfy."""
    if entry is not None:
        return padded(batched(pipeline, entry)["prompt_embeds"])
    encoder = pipeline.text_encoder
    (embeds,) = embedded(encoder, pipeline.tokenizer, [text], encoder.device)
    return padded(embeds[None])


def _guidance(pipeline: Any, asked: float | None) -> dict[str, float]:
    if pipeline.config.boundary_ratio is None:
        return {"guidance_scale": _GUIDANCE if asked is None else asked}
    own = _GUIDANCE_TWO_EXPERTS[FROM_IMAGE if _takes_picture(pipeline) else FROM_TEXT]
    high, low = own if asked is None else (asked, asked)
    return {"guidance_scale": high, "guidance_scale_2": low}


def _check(pipeline: Any, request: SampleRequest, width: int, height: int) -> None:
    """What the pipeline would round, or stop at with an error of its own."""
    multiple = pipeline.vae_scale_factor_spatial * pipeline.transformer.config.patch_size[1]
    step = pipeline.vae_scale_factor_temporal
    problems = []
    for name, side in (("width", width), ("height", height)):
        if side % multiple:
            near = max(multiple, round(side / multiple) * multiple)
            problems.append(Problem(f"validation.{name}", str(side), f"a multiple of {multiple}", str(near)))
    if request.frames < 1 or (request.frames - 1) % step:
        near = max(0, round((request.frames - 1) / step)) * step + 1
        problems.append(Problem("validation.num_frames", str(request.frames), f"{step} k + 1 frames", str(near)))
    takes_picture = _takes_picture(pipeline)
    if takes_picture and not request.references:
        expected = "a picture: these weights go on from a first frame"
        problems.append(Problem("validation.prompts.references", "none", expected, "the path of a picture"))
    if request.references and (not takes_picture or len(request.references) > 1):
        expected = "one: the first frame" if takes_picture else "none: these weights start from text alone"
        hint = "leave them out" if not takes_picture else "leave the others out"
        problems.append(Problem("validation.prompts.references", f"{len(request.references)} pictures", expected, hint))
    if problems:
        raise ConfigError(problems)
