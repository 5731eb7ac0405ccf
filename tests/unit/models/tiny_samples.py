"""Tiny pipelines, loaded and run by diffusers' own code."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline
from PIL import Image
from torch import nn

from gracetune.config.families import flavours
from gracetune.models.qwen_image.load import ImageProcessor
from gracetune.models.registry import geometry

PROMPT = "a red cat, 猫 🐈"
_TWINS = ("t2v-14b-2.1", "i2v-14b-720p-2.1", "t2i-2512", "krea", "turbo", "klein-9b", "klein-base-9b", "klein-4b")
"""Flavours that differ from another one only in a number or in the values of the weights."""
ALL = [
    pytest.param(
        family,
        flavour.name,
        id=f"{family}-{flavour.name}",
        marks=[pytest.mark.full] if flavour.name in _TWINS else [],
    )
    for family in ("wan", "qwen_image", "flux", "flux2", "z_image", "krea2", "sdxl", "stable_audio")
    for flavour in flavours(family)
]
ONE_EACH = [
    pytest.param(
        *one.values,
        id=one.id,
        marks=[] if one.values[1] == flavours(str(one.values[0]))[0].name else [pytest.mark.full],
    )
    for one in ALL
]
"""One flavour of each family, for the daily tests."""
DENOISERS = ("transformer", "transformer_2", "unet")


def load(folder: Path, **changed: Any) -> Any:
    if (folder / "processor").is_dir():  # the stock one asks for torchvision
        changed["processor"] = ImageProcessor.from_pretrained(folder / "processor")
    pipeline = DiffusionPipeline.from_pretrained(folder, **changed)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def image(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 48, 3), dtype=np.uint8))


@dataclass
class Recorder:
    """Records the inputs of every denoiser of a pipeline."""

    calls: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def watch(self, pipeline: Any) -> Recorder:
        for name in DENOISERS:
            module = pipeline.components.get(name)
            if module is not None:
                self.calls[name] = []
                module.register_forward_pre_hook(self._note(name), with_kwargs=True)
        return self

    def _note(self, name: str) -> Any:
        def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            names = inspect.signature(module.forward).parameters
            self.calls[name].append(named | dict(zip(names, given, strict=False)))

        return note


def caption(pipeline: Any, prompt: str) -> torch.Tensor:
    """What Wan reads of a prompt. Its image-to-video pipelines cannot say it themselves where ftfy is missing.

    Wan treats all tokens before the last 512 as the image.
    """
    tokens = pipeline.tokenizer(prompt, padding="max_length", max_length=512, return_tensors="pt")
    with torch.no_grad():
        return pipeline.text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state


def arguments(pipeline: Any, family: str, flavour: str, prompt: str, references: int) -> dict[str, Any]:
    requested = geometry(family, flavour)
    if requested.makes == "audio":
        return {"prompt": prompt}
    given: dict[str, Any] = {"prompt": prompt, "width": requested.side_multiple, "height": requested.side_multiple}
    if requested.makes == "video":
        given["num_frames"] = requested.frame_step + 1
    images = [image(seed) for seed in range(references)]
    if family == "wan" and not isinstance(pipeline, WanPipeline):
        del given["prompt"]
        words = {"prompt_embeds": caption(pipeline, prompt), "negative_prompt_embeds": caption(pipeline, "")}
        return given | words | {"image": image()}
    if flavour == "schnell":
        given["max_sequence_length"] = 256
    if flavour == "kontext":
        given |= {"image": image(), "_auto_resize": False, "max_area": 32 * 32}
    if "edit" in flavour:
        given["image"] = images if "-25" in flavour else images[0]
    return given


def sample(
    pipeline: Any, family: str, flavour: str, *, prompt: str = PROMPT, steps: int = 2, references: int = 1, **more: Any
) -> np.ndarray:
    given = arguments(pipeline, family, flavour, prompt, references) | more
    generator = torch.Generator().manual_seed(1)
    answer = pipeline(num_inference_steps=steps, generator=generator, output_type="np", **given)
    return np.asarray(next(iter(answer.values())))


@pytest.fixture
def small_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """The edit pipelines enlarge every reference to a megapixel: seconds even for a tiny VAE."""
    base = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit"
    monkeypatch.setattr(f"{base}.calculate_dimensions", lambda area, ratio: (32, 32, None))
    monkeypatch.setattr(f"{base}_plus.calculate_dimensions", lambda area, ratio: (32, 32))
