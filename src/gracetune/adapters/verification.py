"""Checks that an adapter fits a model: every layer exists and has the right size, no key is left over, no value is NaN.

An adapter does not have to cover every layer. A layer without an adapter is reported only if the same layer of other
blocks has one, and this does not count as a mismatch.

`Base` is the base model of an adapter, as `gracetune adapter` needs it: layer shapes, single weights, weight folders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from gracetune.adapters.delta import misfit
from gracetune.adapters.formats.reading import AdapterContents
from gracetune.adapters.state import ExpertStage
from gracetune.config.families import Family
from gracetune.config.run_config import Model
from gracetune.errors import ConfigError, Problem
from gracetune.models.layout import weight_file
from gracetune.models.registry import build_published, spec_of
from gracetune.models.source import ModelSource, open_source
from gracetune.models.spec import Expert
from gracetune.storage.safetensors_files import open_tensors
from gracetune.storage.safetensors_headers import open_weights

Shapes = Mapping[str, Sequence[int]]
"""Weight shapes of a model's layers, by path."""


@dataclass(frozen=True)
class Verified:
    expert: ExpertStage
    matched: tuple[str, ...]
    missing: tuple[str, ...]
    """Layers with missing or inconsistent tensors, each with the reason."""
    unexpected: tuple[str, ...]
    """Layers the model does not have, and keys that name no layer."""
    mismatched: tuple[str, ...]
    """Layers of another size, with both sizes, and contradictory statements about the expert."""
    not_finite: tuple[str, ...]
    left_out: tuple[str, ...]
    """Layers without an adapter although the same layer of another block has one."""

    @property
    def ok(self) -> bool:
        return bool(self.matched) and not (self.missing or self.unexpected or self.mismatched or self.not_finite)


def verify(reading: AdapterContents, models: Mapping[ExpertStage, Shapes]) -> list[Verified]:
    """One report for each expert in the file. `models` has the shapes by expert; `""` applies to any other expert."""
    broken = tuple(f"{layer}: {why}" for layer, why in reading.broken.items())
    reports = []
    for expert, state in sorted(reading.states.items()):
        shapes = models.get(expert) or models.get("") or next(iter(models.values()))
        misfits = {path: misfit(layer, shapes[path]) for path, layer in state.layers.items() if path in shapes}
        matched = tuple(path for path, why in misfits.items() if why is None)
        reports.append(
            Verified(
                expert=expert,
                matched=matched,
                missing=broken,
                unexpected=(*(path for path in state.layers if path not in shapes), *reading.unknown),
                mismatched=(
                    *reading.contradictions,
                    *(f"{path}: {why}" for path, why in misfits.items() if why is not None),
                ),
                not_finite=reading.not_finite,
                left_out=_left_out(state.layers, shapes),
            )
        )
    if not reports:
        reports.append(Verified("", (), broken, reading.unknown, (), reading.not_finite, ()))
    return reports


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The weight shapes of every layer that can have an adapter. The model may be on the meta device."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return {path: tuple(layer.weight.shape) for path, layer in model.named_modules() if isinstance(layer, kinds)}


def _left_out(adapted: Iterable[str], shapes: Shapes) -> tuple[str, ...]:
    have = set(adapted)
    roles = {_role(path) for path in have if re.search(r"\.[0-9]+\.", path)}
    return tuple(path for path in shapes if path not in have and _role(path) in roles)


def _role(path: str) -> str:
    """The path without block numbers: the same layer of different blocks has the same role."""
    return re.sub(r"(?<=\.)[0-9]+(?=\.)", "#", path)


# -- the base model ----------------------------------------------------------------------------------------------------


Weight = Callable[[str], Tensor]


class Base:
    """A model that is present on this machine."""

    def __init__(self, family: Family, name: str) -> None:
        self.family = family
        self.source: ModelSource = open_source(Model(family=family, path=name))
        with _quiet():
            self._spec = spec_of(family)
        self.experts: tuple[Expert, ...] = self._spec.inspect(self.source).experts

    def expert(self, name: ExpertStage) -> Expert:
        """The denoiser that an adapter of this expert belongs to."""
        if len(self.experts) == 1:
            return self.experts[0]
        found = next((expert for expert in self.experts if expert.name == name), None)
        if found is None:
            names = ", ".join(expert.name for expert in self.experts)
            hint = "name the file ..._high_noise.safetensors or ..._low_noise.safetensors"
            raise ConfigError([Problem("stage", "the file does not identify its expert", names, hint)])
        return found

    def shapes(self) -> dict[str, Shapes]:
        """The weight shapes of every layer, by expert."""
        return {expert.name: shapes_of(self._spec.build_denoiser(self.source, expert)) for expert in self.experts}

    def folder(self, expert: ExpertStage) -> Path:
        """The folder of the expert's weights, in diffusers' layout."""
        if self.source.single_file is not None:
            hint = "save it with diffusers' from_single_file and save_pretrained, and give that folder"
            found = f"{self.source.name}, one file with the original model's names"
            raise ConfigError([Problem("--model, --merge-into", found, "a folder in diffusers' layout", hint)])
        return self.source.part(self.expert(expert).component)

    def weight(self, expert: ExpertStage) -> Weight:
        """A function that reads the weight of the layer at a path from disk."""
        self.folder(expert)
        weights = open_weights(weight_file(self.source, self.expert(expert).component))

        def read(path: str) -> Tensor:
            entry = weights.entries.get(f"{path}.weight")
            if entry is None:
                hint = "gracetune adapter verify shows what else does not fit"
                raise ConfigError([Problem(path, "no such layer", f"a layer of {self.source.name}", hint)])
            with open_tensors(entry.path) as file:
                tensor: Tensor = file.get_tensor(entry.name)
            return tensor

        return read


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers, which warns about missing image libraries that checking an adapter does not need."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def published_shapes(family: str, flavour: str) -> dict[str, Shapes]:
    """The weight shapes of a published flavour, without its weights. They are the same for both experts."""
    return {"": shapes_of(build_published(family, flavour))}
