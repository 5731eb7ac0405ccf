"""A denoiser of any size with drawn weights, made where it is used: nothing is written to disk or copied to a GPU.

The folder holds configuration files alone: those of a tiny model, with the denoiser's own replaced by the published
ones. So everything a run reads off a model's files (experts, schedule, shift, layers without a gradient) is read here
by the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gracetune.bench.step.job import Preset, Scale
from gracetune.models.loading import RandomFill, load_component
from gracetune.models.published import build_published
from gracetune.models.registry import spec_of
from gracetune.models.source import ModelSource, read_json
from gracetune.models.spec import Expert, ModelFacts, ModelSpec, PartPlacement
from gracetune.models.tiny import build
from gracetune.seeded_random import torch_seed

_UNIFORM = math.sqrt(3)
"""A uniform draw of bound b has a standard deviation of b / sqrt(3)."""


@dataclass(frozen=True, eq=False)
class RandomModel:
    preset: Preset
    source: ModelSource
    spec: ModelSpec
    """The family's, but for one function: its denoisers are drawn instead of read."""
    facts: ModelFacts
    plain_denoiser: Callable[[PartPlacement], nn.Module]
    """The library's own class, with nothing of ours in it."""

    @property
    def expert(self) -> Expert:
        return self.facts.experts[0]

    @property
    def denoiser_config(self) -> Mapping[str, Any]:
        return read_json(self.source.part(self.expert.component) / "config.json")


def make_model(preset: Preset, folder: Path, scale: Scale, *, seed: int = 0) -> RandomModel:
    """Writes the configuration files into `folder`, which is to be new."""
    build(preset.family, preset.flavour, folder)
    spec, source = spec_of(preset.family), ModelSource(preset.name, folder)
    for expert in spec.inspect(source).experts:
        part = folder / expert.component
        for file in part.glob("*.safetensors"):
            file.unlink()  # nobody is to train the tiny model's weights by mistake
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
        return load_component(source, expert.component, cls, placement, random_fill=drawing(seed), adjust=spec.adjust)

    def as_published(placement: PartPlacement) -> nn.Module:
        expert = facts.experts[0]
        cls = type(spec.build_denoiser(source, expert))
        return load_component(source, expert.component, cls, placement, random_fill=drawing(seed))

    return RandomModel(preset, source, replace(spec, load_denoiser=build_random), facts, as_published)


def drawing(seed: int) -> RandomFill:
    """Normal values of the spread the layers' own constructors give them, never zeros.

    Each tensor's depend on the seed and its name alone, so that a model held in another precision has the same ones.
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
    """Mean and standard deviation."""
    if isinstance(module, nn.Linear):
        return 0.0, 1 / (math.sqrt(module.in_features) * _UNIFORM)
    if isinstance(module, nn.modules.conv._ConvNd):
        return 0.0, 1 / (math.sqrt(module.weight[0].numel()) * _UNIFORM)
    if isinstance(module, nn.Embedding):
        return 0.0, 1.0
    if "Norm" in type(module).__name__:
        return (1.0, 0.02) if name == "weight" else (0.0, 0.02)
    return 0.0, 1 / math.sqrt(tensor.shape[-1])
