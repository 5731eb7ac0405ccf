"""A denoiser of any size with random weights, created on the device. No weights are written to disk or copied to a GPU.

The model folder contains config files only: those of a tiny model, with the denoiser's config replaced by the published
one. So the code of a run reads everything else (experts, schedule, shift, untrained layers) from the files as usual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gracetune.bench.step.job import ModelScale, Preset
from gracetune.models.loading import RandomFill, load_component
from gracetune.models.registry import build_published, spec_of
from gracetune.models.source import ModelSource, read_json
from gracetune.models.spec import Expert, ModelFacts, ModelSpec, PartPlacement
from gracetune.models.tiny import build
from gracetune.seeded_random import torch_seed

_UNIFORM = math.sqrt(3)
"""A uniform distribution on [-b, b] has the standard deviation b / sqrt(3)."""


@dataclass(frozen=True, eq=False)
class RandomModel:
    preset: Preset
    source: ModelSource
    spec: ModelSpec
    """The family's spec, except that its denoisers get random weights instead of loaded ones."""
    facts: ModelFacts
    plain_denoiser: Callable[[PartPlacement], nn.Module]
    """The library's own class without our changes."""

    @property
    def expert(self) -> Expert:
        return self.facts.experts[0]

    @property
    def denoiser_config(self) -> Mapping[str, Any]:
        return read_json(self.source.part(self.expert.component) / "config.json")


def make_model(preset: Preset, folder: Path, scale: ModelScale, *, seed: int = 0) -> RandomModel:
    """Write the config files into `folder`, which must be new, and describe the model."""
    build(preset.family, preset.flavour, folder)
    spec, source = spec_of(preset.family), ModelSource(preset.name, folder)
    for expert in spec.inspect(source).experts:
        part = folder / expert.component
        for file in part.glob("*.safetensors"):
            file.unlink()  # so that the tiny model's weights cannot be used by mistake
        if scale != "tiny":
            published: Any = build_published(preset.family, preset.flavour)
            if scale == "small":
                plain = {name: value for name, value in published.config.items() if not name.startswith("_")}
                with torch.device("meta"):
                    published = type(published)(**{**plain, **preset.small})
            published.save_config(str(part))
    facts = spec.inspect(source)

    def build_random(source: ModelSource, expert: Expert, placement: PartPlacement) -> nn.Module:
        cls = type(spec.build_denoiser(source, expert))
        return load_component(
            source, expert.component, cls, placement, random_fill=random_weights(seed), adjust=spec.adjust
        )

    def as_published(placement: PartPlacement) -> nn.Module:
        expert = facts.experts[0]
        cls = type(spec.build_denoiser(source, expert))
        return load_component(source, expert.component, cls, placement, random_fill=random_weights(seed))

    return RandomModel(preset, source, replace(spec, load_denoiser=build_random), facts, as_published)


def random_weights(seed: int) -> RandomFill:
    """A `RandomFill` with normal values of the spread that the layers' constructors use, and never with zeros.

    Values depend only on the seed and the tensor's name, so a model in another precision gets the same ones.
    """

    @torch.no_grad()
    def random_fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        done: set[int] = set()
        for name, tensor in tensors.items():
            if id(tensor) in done or not tensor.is_floating_point():
                continue
            done.add(id(tensor))
            owner, _, own = name.rpartition(".")
            mean, spread = _first_values(model.get_submodule(owner), own, tensor)
            generator = torch.Generator(tensor.device).manual_seed(torch_seed(seed, "weights", name))
            tensor.normal_(mean, spread, generator=generator)

    return random_fill


def _first_values(module: nn.Module, name: str, tensor: Tensor) -> tuple[float, float]:
    """Mean and standard deviation for one tensor of `module`."""
    if isinstance(module, nn.Linear):
        return 0.0, 1 / (math.sqrt(module.in_features) * _UNIFORM)
    if isinstance(module, nn.modules.conv._ConvNd):
        return 0.0, 1 / (math.sqrt(module.weight[0].numel()) * _UNIFORM)
    if isinstance(module, nn.Embedding):
        return 0.0, 1.0
    if "Norm" in type(module).__name__:
        return (1.0, 0.02) if name == "weight" else (0.0, 0.02)
    return 0.0, 1 / math.sqrt(tensor.shape[-1])
