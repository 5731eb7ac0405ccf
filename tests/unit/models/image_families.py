"""Shared by the tests of the image families."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from gracetune.cache.collate import collate
from gracetune.data.media.load import Sample, to_pixels
from gracetune.data.refs import AppliedAugmentation, Bucket, CaptionRef, Fit, SampleRef
from gracetune.models.registry import FOOTPRINTS
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions, ModelFacts, ModelSpec, PartPlacement

CPU = PartPlacement(torch.device("cpu"), torch.float32)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
SHORT, LONG = "a red cat", "a blue dog with a much longer story: 猫 and so on"
WIDE = (48, 32)
"""Width and height of the images. Not square, so that swapping them is detected."""


def source(folder: Path) -> ModelSource:
    return ModelSource("tiny", folder)


def image(seed: int = 0, size: tuple[int, int] = WIDE) -> Image.Image:
    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def sample_of(image: Image.Image, *conditioning: Sample, digest: str = "0123456789abcdef" * 2, **more: Any) -> Sample:
    """An image as `data.load` returns it. `more`: fit, augmentation and mask."""
    ref = SampleRef(
        dataset="d",
        path="a.png",
        digest=digest,
        bucket=Bucket(*image.size),
        fit=more.get("fit", Fit(image.size, image.size)),
        caption=CaptionRef(""),
        augmentation=more.get("augmentation", AppliedAugmentation()),
        conditioning=tuple(sample.ref for sample in conditioning),
    )
    return Sample(ref, to_pixels([image])[:, 0], None, more.get("mask"), conditioning)


def batch_of(*entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entries collated as the batch source does."""
    return {name: one.build() for name, one in collate(entries, [str(n) for n in range(len(entries))]).items()}


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


def targets(spec: ModelSpec, denoiser: nn.Module) -> dict[str, nn.Module]:
    """The default targets, including those that get no gradient."""
    found = dict(denoiser.named_modules())
    for pattern in spec.default_targets:
        assert any(fnmatchcase(name, pattern) for name in found), f"{pattern} matches nothing"
    return {
        name: module
        for name, module in found.items()
        if any(fnmatchcase(name, pattern) for pattern in spec.default_targets)
    }


def check_gradients(spec: ModelSpec, facts: ModelFacts, denoiser: nn.Module, loss: Callable[[], Tensor]) -> None:
    """Exactly the default targets that are not declared untrained get a gradient."""
    layers = targets(spec, denoiser)
    assert all(isinstance(layer, nn.Linear) for layer in layers.values())
    untrained = (*spec.untrained, *facts.untrained)
    assert all(any(fnmatchcase(name, pattern) for name in layers) for pattern in untrained)
    for layer in layers.values():
        layer.weight.requires_grad_(True)
    loss().backward()
    for name, layer in layers.items():
        gradient = layer.weight.grad
        learns = gradient is not None and bool(gradient.abs().max() > 0)
        assert learns != any(fnmatchcase(name, pattern) for pattern in untrained), name


def check_targets_are_counted(spec: ModelSpec) -> None:
    """The memory estimate counts the default targets."""
    footprint = FOOTPRINTS[spec.family][0]
    counted = {
        f"{block.name}.{linear.name}" for block in footprint.blocks for linear in block.linears if linear.default
    }
    ends = [max((name for name in counted if target.endswith(name)), key=len) for target in spec.default_targets]
    assert {*ends} == counted


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
