"""Resolve a model given as a family, `family/flavour`, a hub id, a folder, or `FAMILY:FILE`."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from typing import Any

from gracetune.config.families import FAMILIES, find_flavour, flavours, readable_names
from gracetune.config.family_names import Flavour
from gracetune.config.path_status import inspect_path
from gracetune.config.run_config import Model
from gracetune.config.spelling import nearest
from gracetune.errors import ConfigError, Problem
from gracetune.hub.access import Repo
from gracetune.models.hub_download import HubName
from gracetune.models.source import INDEX, open_source
from gracetune.storage.regular_files import read_small_file

EXPECTED = "a family, family/flavour, a hub id, a model's folder, or FAMILY:FILE"


@dataclass(frozen=True)
class ChosenModel:
    family: str
    flavour: Flavour
    path: str | None = None
    """None uses the published weights of the flavour."""
    is_certain: bool = True
    """False if the flavour is only assumed to be the first of its family."""
    parameters: int | None = None
    """Parameters of a denoiser in the model's folder; None for other models."""

    @property
    def name(self) -> str:
        return f"{self.family}/{self.flavour.name}"

    @property
    def missing_weights(self) -> str | None:
        """The hub id of which nothing is in the hub's cache, so that training downloads it; None if there is none."""
        name = self.path or self.flavour.weights
        if inspect_path(name).kind != "nothing" or HubName.parse(name) is not None:
            return None
        return None if Repo(name).cache_folder.is_dir() else name

    @property
    def values(self) -> dict[str, Any]:
        """The `model` section of a config."""
        flavour = {"flavour": self.flavour.name} if self.is_certain else {}
        return {"family": self.family, **flavour, **({"path": self.path} if self.path else {})}


def model_named(text: str) -> ChosenModel:
    """Resolve `text`, or raise ConfigError. Only a folder makes it read weights."""
    family, slash, name = text.partition("/")
    if family in FAMILIES and (not slash or find_flavour(family, name)):
        return ChosenModel(family, find_flavour(family, name) or flavours(family)[0])
    for one in readable_names():
        for flavour in one.flavours:
            if flavour.weights.lower() == text.lower():
                return ChosenModel(one.family, flavour)
    family, colon, path = text.partition(":")
    if colon and family in FAMILIES and path:
        return _of_family(family, path)
    place = inspect_path(text)
    if place.kind == "folder" and (place.path / INDEX).is_file():
        return _of_family(_family_of(text), text)
    raise ConfigError([_unknown(text)])


def _of_family(family: str, path: str) -> ChosenModel:
    place = inspect_path(path)
    if place.kind == "folder":
        from gracetune.models.registry import spec_of  # imports torch

        path = str(place.path.absolute())
        spec, source = spec_of(family), open_source(Model(family=family, path=path))
        facts = spec.inspect(source)
        flavour = find_flavour(family, facts.flavour)
        assert flavour is not None
        parameters = sum(one.numel() for one in spec.build_denoiser(source, facts.experts[0]).parameters())
        return ChosenModel(family, flavour, path, parameters=parameters)
    path = str(place.path.absolute()) if place.kind == "file" else path
    return ChosenModel(family, flavours(family)[0], path, is_certain=False)


def _family_of(folder: str) -> str:
    """The family of a folder in diffusers' layout, by the pipeline class in its model_index.json."""
    file = inspect_path(folder).path / INDEX
    try:
        pipeline = json.loads(read_small_file(file)).get("_class_name")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            [Problem("--model", f"{file}: {error}", "a JSON object", "download the model again")]
        ) from None
    for one in readable_names():
        if pipeline in one.pipelines:
            return one.family
    known = ", ".join(name for one in readable_names() for name in one.pipelines)
    raise ConfigError([Problem("--model", f"{folder}, the parts of a {pipeline}", known, "name another model")])


def _nearest_folder(text: str) -> str | None:
    """The model's folder of the most similar name beside a path that does not exist, written as `text` is."""
    parent, slash, name = text.rstrip("/").rpartition("/")
    place = inspect_path(parent + slash if slash else ".")
    if place.kind != "folder" or not os.access(place.path, os.R_OK | os.X_OK):
        return None
    near = nearest(name, [one.parent.name for one in sorted(place.path.glob(f"*/{INDEX}"))])
    return None if near is None else f"{parent}{slash or './'}{near}"


def _unknown(text: str) -> Problem:
    names = [*FAMILIES, *(f"{family}/{one.name}" for family in FAMILIES for one in flavours(family))]
    kind = inspect_path(text).kind
    if kind == "file":
        return Problem("--model", f"{text}, a file", EXPECTED, f"--model sdxl:{text}, if it is one of SDXL")
    if kind == "folder":
        return Problem(
            "--model", f"{text}, a folder without {INDEX}", EXPECTED, f"--model sdxl:{text}, or another folder"
        )
    folder = _nearest_folder(text)
    if folder is not None:
        return Problem("--model", f"{text}, which does not exist", EXPECTED, f"--model {shlex.quote(folder)}")
    near = nearest(text, names)
    hint = f"--model {near}" if near else f"--model sdxl:{text}, if it is one of SDXL; families: {', '.join(FAMILIES)}"
    return Problem("--model", text, EXPECTED, hint)
