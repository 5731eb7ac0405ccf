"""Load the presets of `gracetune/presets`: a purpose, its models and values. The README there describes the format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import gracetune
from gracetune.config.spelling import nearest
from gracetune.config.yaml_syntax import parse_yaml
from gracetune.errors import ConfigError, Problem

Media = Literal["image", "video", "audio", "edit"]
FOLDER = Path(gracetune.__file__).parent / "presets"
_FAMILIES = "families"
"""The file with values shared by all presets; it is not a preset."""


@dataclass(frozen=True)
class StepCount:
    """The number of optimizer steps of a run: `each` per file, between `least` and `most`."""

    each: int
    """Steps per file of the dataset."""
    least: int
    most: int
    source: str

    def of(self, files: int) -> int:
        return max(self.least, min(self.most, self.each * files))


@dataclass(frozen=True)
class Option:
    """One value, and the URL that recommends it."""

    value: Any
    source: str


@dataclass(frozen=True)
class TrainingPreset:
    name: str
    title: str
    media: Media
    models: tuple[str, ...]
    """`family/flavour`, in order of preference: the first that fits the machine is proposed."""
    steps: StepCount
    options: Mapping[str, Mapping[str, Option]]
    """Options by family or `family/flavour`. The key "" holds those for every family."""

    def options_of(self, family: str, flavour: str) -> dict[str, Option]:
        """Options by dotted config key. More specific layers override general ones."""
        shared = _shared()
        layers = [shared.get(family, {}), shared.get(f"{family}/{flavour}", {}), self.options[""]]
        layers += [self.options.get(family, {}), self.options.get(f"{family}/{flavour}", {})]
        return {key: option for layer in layers for key, option in layer.items()}

    def sources_for(self, family: str, flavour: str) -> list[str]:
        """The URLs behind the steps and the options, without repetition."""
        used = [self.steps.source, *(option.source for option in self.options_of(family, flavour).values())]
        return [*dict.fromkeys(used)]


@cache
def presets() -> dict[str, TrainingPreset]:
    """All presets by name. The first one for a kind of media is its default."""
    names = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != _FAMILIES)
    return {name: _preset(name) for name in names}


def presets_for(media: Media) -> list[TrainingPreset]:
    return [preset for preset in presets().values() if preset.media == media]


def preset_named(name: str) -> TrainingPreset:
    if name not in presets():
        known = ", ".join(presets())
        raise ConfigError(
            [Problem("--preset", name, known, f"--preset {nearest(name, presets()) or next(iter(presets()))}")]
        )
    return presets()[name]


@cache
def _shared() -> dict[str, dict[str, Option]]:
    data = _read(_FAMILIES)
    return {name: _options(values, data["sources"]) for name, values in data["families"].items()}


def _preset(name: str) -> TrainingPreset:
    data = _read(name)
    sources, steps = data["sources"], data["steps"]
    options = {"": _options(data["values"], sources)}
    options |= {family: _options(values, sources) for family, values in data.get("families", {}).items()}
    return TrainingPreset(
        name, data["title"], data["media"], tuple(data["models"]),
        StepCount(steps["each"], steps["least"], steps["most"], sources[steps["source"]]), options,
    )  # fmt: skip


def _options(values: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Option]:
    return {key: Option(one["value"], sources[one["source"]]) for key, one in values.items()}


def _read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = parse_yaml((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return data
