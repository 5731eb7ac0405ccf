"""Tiny models of every flavour, written as ordinary model folders in about a second and without a download."""

from __future__ import annotations

from pathlib import Path

from gracetune.config.families import FAMILIES, find_flavour, flavours
from gracetune.config.spelling import nearest
from gracetune.errors import ConfigError, Problem
from gracetune.models.registry import spec_of

RECIPE = 1
"""Version of the written models. Raise it with every change, so that older cached folders are not reused."""


def build(family: str, flavour: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the tiny model of a flavour into a new or empty folder, and return the folder."""
    _check(family, flavour)
    return spec_of(family).build_tiny(folder, flavour, seed=seed)


def cached(family: str, flavour: str, root: Path, *, seed: int = 0) -> Path:
    """The tiny model of a flavour in its own folder below `root`. Built unless it already exists."""
    _check(family, flavour)
    folder = root / f"{family}-{flavour}-seed-{seed}-recipe-{RECIPE}"
    if (folder / "model_index.json").is_file():
        return folder
    try:
        return build(family, flavour, folder, seed=seed)
    except (ConfigError, OSError):
        if (folder / "model_index.json").is_file():  # another process was faster; folders appear complete
            return folder
        raise


def _check(family: str, flavour: str) -> None:
    if family not in FAMILIES:
        raise ConfigError([_unknown("model.family", family, FAMILIES)])
    if find_flavour(family, flavour) is None:
        raise ConfigError([_unknown("model.flavour", flavour, [supported.name for supported in flavours(family)])])


def _unknown(key: str, found: str, names: list[str] | tuple[str, ...]) -> Problem:
    return Problem(key=key, found=found, expected=", ".join(names), hint=nearest(found, names) or names[0])
