"""Shared by the tests of the image families."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from gracetune.models.registry import FOOTPRINTS
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, ModelSpec, PartPlacement
from gracetune.testing.family_check.activations import check_published
from gracetune.testing.family_check.adapters import check_gradients, targets
from gracetune.testing.family_check.case import CPU, batch_of, random_image, sample_of

__all__ = ["CPU", "batch_of", "check_gradients", "sample_of", "targets"]

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
SHORT, LONG = "a red cat", "a blue dog with a much longer story: 猫 and so on"
WIDE = (48, 32)
"""Width and height of the images. Not square, so that swapping them is detected."""


def source(folder: Path) -> ModelSource:
    return ModelSource("tiny", folder)


def image(seed: int = 0, size: tuple[int, int] = WIDE) -> Image.Image:
    return random_image(size, seed)


@dataclass
class Calls:
    """The inputs and outputs of a denoiser."""

    inputs: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Tensor] = field(default_factory=list)


@contextmanager
def watched(denoiser: nn.Module) -> Iterator[Calls]:
    calls = Calls()

    def note(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], answer: tuple[Tensor]) -> None:
        calls.inputs.append({**{str(place): value for place, value in enumerate(given)}, **named})
        calls.answers.append(answer[0])

    hook = denoiser.register_forward_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def assert_same_inputs(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Both calls passed the same tensors."""
    for name in ours.keys() | theirs.keys():
        mine, other = ours.get(name), theirs.get(name)
        if isinstance(other, dict) and isinstance(mine, dict):
            assert_same_inputs(mine, other)
        elif isinstance(other, Tensor) or isinstance(mine, Tensor):
            assert mine is not None, name
            assert other is not None, name
            expected = other.expand_as(mine) if other.ndim == 0 else other  # a U-Net gets one step for the whole batch
            torch.testing.assert_close(
                mine.float(), expected.float(), **TOLERANCE, msg=lambda text, n=name: f"{n}: {text}"
            )


def check_targets_are_counted(spec: ModelSpec) -> None:
    """The memory estimate counts the default targets."""
    footprint = FOOTPRINTS[spec.family][0]
    check_published(spec, footprint)


def check_half_precision(spec: ModelSpec, folder: Path, entries: list[dict[str, Tensor]], noisy: Tensor) -> None:
    """A bfloat16 denoiser predicts in bfloat16, close to its float32 prediction, from entries of either dtype."""
    # Flux' model time is in thousandths, which bfloat16 cannot all represent. It can represent these.
    facts, level, half = (
        spec.inspect(source(folder)),
        torch.tensor([0.25, 0.5]),
        PartPlacement(CPU.device, torch.bfloat16),
    )
    answers = []
    for placement in (CPU, half):
        denoiser = spec.load_denoiser(source(folder), facts.experts[0], placement)
        with torch.no_grad():
            answers.append(spec.predict(denoiser, noisy.to(placement.dtype), level, batch_of(*entries), facts))
    exact, rough = answers
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).norm() / exact.norm() < 0.03


def assert_id_tells_apart(spec: ModelSpec, folder: Path) -> None:
    """Everything that changes an entry changes the id."""
    half = PartPlacement(torch.device("cpu"), torch.bfloat16)
    latent = [
        spec.load_latent_encoder(source(folder), placement, options).id
        for placement in (CPU, half)
        for options in (EncodeOptions(), EncodeOptions(posterior="sample"), EncodeOptions(tiling=True))
    ]
    text = [spec.load_text_encoder(source(folder), placement).id for placement in (CPU, half)]
    assert len({*latent, *text}) == len(latent) + len(text)
    assert spec.load_latent_encoder(source(folder), CPU, EncodeOptions(slicing=True)).id == latent[0]


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "model"))


def rewrite(path: Path, **changed: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
