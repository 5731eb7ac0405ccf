"""The inputs and the prediction of Wan's denoisers, in training and in generated clips.

B samples, C latent channels, F latent frames, H x W latent pixels, T tokens of the longest caption. Everything is in
the dtype of `noisy`: the caller chooses the compute dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from PIL import ImageOps
from torch import Tensor, nn

from gracetune.errors import Problem
from gracetune.models.common.sample_checks import batched, reject, side_problems
from gracetune.models.spec import BlockRouting, ModelFacts, Sampled, SampleRequest
from gracetune.models.token_routing import select_tokens
from gracetune.models.wan.encode import embed_captions
from gracetune.models.wan.load import FROM_IMAGE, FROM_TEXT, PIPELINES, TEXT_TOKENS


def predict(
    denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts
) -> Tensor:
    """[B, C, F, H, W], noise - latents. Padding in `prompt_embeds` [B, T, D] must be zeros, as in pretraining."""
    time = facts.schedule.model_time(level)
    states = noisy
    if facts.details["from_image"]:
        states = torch.cat([noisy, batch["condition"].to(noisy)], dim=1)
    elif facts.details["expand_timesteps"] and "condition" in batch:
        states, time = _from_first_frame(noisy, time, batch["condition"].to(noisy), facts.details["patch_size"])
    image = batch["image_embeds"].to(noisy) if facts.details["image_encoder"] else None
    prediction: Tensor = denoiser(
        hidden_states=states,
        timestep=time,
        encoder_hidden_states=padded(batch["prompt_embeds"].to(noisy)),
        encoder_hidden_states_image=image,
        return_dict=False,
    )[0]
    return prediction


def graph_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Pads captions of any length to one shape, as the denoiser gets them. It attends to the padding, so there is no
    mask."""
    given = {name: one for name, one in batch.items() if name in ("condition", "image_embeds")}
    return {**given, "prompt_embeds": padded(batch["prompt_embeds"])}


def padded(embeds: Tensor) -> Tensor:
    """[B, T, D] -> [B, 512, D]."""
    return F.pad(embeds, (0, 0, 0, TEXT_TOKENS - embeds.shape[1]))


def _from_first_frame(noisy: Tensor, time: Tensor, first: Tensor, patch: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Replace the first frame by the clean one, and return a time for every token: 0 for those of the first frame.

    Only used here, although diffusers' pipeline always gives every token its own time. If all times are equal, one time
    per sample gives the same result and saves 6 float32 values per token and channel in every block.
    """
    states = torch.cat([first, noisy[:, :, 1:]], dim=2)
    _, _, frames, height, width = noisy.shape
    times = time[:, None].repeat(1, frames // patch[0])  # [B, F]
    times[:, 0] = 0
    per_frame = (height // patch[1]) * (width // patch[2])
    return states, times.repeat_interleave(per_frame, dim=1)


# -- token routing -----------------------------------------------------------------------------------------------------


PATCH = (1, 2, 2)


def _select(given: Mapping[str, Any], kept: Tensor) -> dict[str, Any]:
    """`rotary_emb`: cosine and sine [1, tokens, 1, channels]; `temb`: [B, 6, D], or [B, tokens, 6, D]."""
    chosen: dict[str, Any] = {"rotary_emb": tuple(select_tokens(table, kept) for table in given["rotary_emb"])}
    if given["temb"].ndim == 4:
        chosen["temb"] = select_tokens(given["temb"], kept)
    return chosen


def _first_frame(latents: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts) -> int:
    """The tokens of a clean first frame (Wan 2.2 5B, image-to-video). They are never routed: the clip depends on
    them."""
    if not (facts.details["expand_timesteps"] and "condition" in batch):
        return 0
    return (latents.shape[-2] // PATCH[1]) * (latents.shape[-1] // PATCH[2])


ROUTING = BlockRouting(PATCH, _select, always=_first_frame)


# -- generated clips and images ----------------------------------------------------------------------------------------


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
    (embeds,) = embed_captions(encoder, pipeline.tokenizer, [text], encoder.device)
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
