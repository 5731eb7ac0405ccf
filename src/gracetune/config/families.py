"""The model families we train, and the published weights behind each flavour's name.

Only names live here, because a config file is checked long before any model code is imported. What a family *does*
is in its folder under `models/`, or in the installed package that brings it (`installed_families`).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator

from gracetune.config.installed_families import GROUP, InstalledFamilies, refused

Modality = Literal["image", "video", "audio"]


@dataclass(frozen=True)
class Flavour:
    """One published set of weights of a family."""

    name: str
    weights: str
    makes: Modality
    dual_expert: bool = False
    edits: bool = False
    from_picture: bool = False
    """Clips go on from a first frame, and only so."""


_FLAVOURS: dict[str, tuple[Flavour, ...]] = {
    "wan": (
        Flavour("t2v-14b-2.2", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "video", dual_expert=True),
        Flavour("i2v-14b-2.2", "Wan-AI/Wan2.2-I2V-A14B-Diffusers", "video", dual_expert=True, from_picture=True),
        Flavour("ti2v-5b-2.2", "Wan-AI/Wan2.2-TI2V-5B-Diffusers", "video"),
        Flavour("t2v-1.3b-2.1", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "video"),
        Flavour("t2v-14b-2.1", "Wan-AI/Wan2.1-T2V-14B-Diffusers", "video"),
        Flavour("i2v-14b-480p-2.1", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "video", from_picture=True),
        Flavour("i2v-14b-720p-2.1", "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", "video", from_picture=True),
    ),
    "qwen_image": (
        Flavour("t2i", "Qwen/Qwen-Image", "image"),
        Flavour("t2i-2512", "Qwen/Qwen-Image-2512", "image"),
        Flavour("edit", "Qwen/Qwen-Image-Edit", "image", edits=True),
        Flavour("edit-2509", "Qwen/Qwen-Image-Edit-2509", "image", edits=True),
        Flavour("edit-2511", "Qwen/Qwen-Image-Edit-2511", "image", edits=True),
    ),
    "flux": (
        Flavour("dev", "black-forest-labs/FLUX.1-dev", "image"),
        Flavour("krea", "black-forest-labs/FLUX.1-Krea-dev", "image"),
        Flavour("schnell", "black-forest-labs/FLUX.1-schnell", "image"),
        Flavour("kontext", "black-forest-labs/FLUX.1-Kontext-dev", "image", edits=True),
    ),
    "sdxl": (Flavour("base-1.0", "stabilityai/stable-diffusion-xl-base-1.0", "image"),),
    "stable_audio": (Flavour("open-1.0", "stabilityai/stable-audio-open-1.0", "audio"),),
}

INSTALLED = InstalledFamilies(tuple(entry_points(group=GROUP)), ours=tuple(_FLAVOURS))
FAMILIES: tuple[str, ...] = (*_FLAVOURS, *INSTALLED.names)


def flavours(family: str) -> tuple[Flavour, ...]:
    """Every flavour of a family; the first is the one taken when a config names none. Empty for a family we lack."""
    if not INSTALLED.has(family):
        return _FLAVOURS.get(family, ())
    found: tuple[Flavour, ...] = INSTALLED.part(family, "flavours", "FLAVOURS")
    if not (isinstance(found, tuple) and found and all(isinstance(one, Flavour) for one in found)):
        raise refused(family, f"FLAVOURS = {found!r}", "a tuple of Flavour, at least one")
    return found


def find_flavour(family: str, name: str) -> Flavour | None:
    return next((flavour for flavour in flavours(family) if flavour.name == name), None)


def _with_flavours(family: str) -> str:
    """A package that is broken is named by `config check` already, and not after hours of caching."""
    flavours(family)
    return family


if TYPE_CHECKING:
    Family = str  # what is installed is not known to a type checker
else:
    Family = Annotated[Literal[FAMILIES], AfterValidator(_with_flavours)]
