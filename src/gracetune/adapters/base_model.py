"""The base model of an adapter, as `gracetune adapter` needs it: layer shapes, single weights, weight folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from gracetune.adapters.state import ExpertStage
from gracetune.adapters.verification import Shapes, shapes_of
from gracetune.config.families import Family
from gracetune.config.run_config import Model
from gracetune.errors import ConfigError, Problem
from gracetune.models.layout import weight_file
from gracetune.models.registry import build_published, spec_of
from gracetune.models.source import ModelSource, open_source
from gracetune.models.spec import Expert
from gracetune.storage.safetensors_files import open_tensors
from gracetune.storage.safetensors_headers import open_weights

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
            raise ConfigError([Problem("stage", "the file does not tell which expert it is for", names, hint)])
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
