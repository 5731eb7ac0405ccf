"""The formats a config can name for adapter files. Each is a record in `adapters/formats/`, found by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import AfterValidator

from gracetune.config.registry import Registry

EXPORT_FORMATS: Final[Registry] = Registry.find(
    "export format",
    "gracetune.export_formats",
    {
        "comfyui": "gracetune.adapters.formats.comfyui:FORMAT",
        "diffusers": "gracetune.adapters.formats.diffusers:FORMAT",
        "kohya": "gracetune.adapters.formats.kohya:FORMAT",
        "lycoris": "gracetune.adapters.formats.lycoris:FORMAT",
    },
)
FORMAT_NAMES: Final[tuple[str, ...]] = EXPORT_FORMATS.names
PROGRAMS: Final[dict[str, str]] = {
    "comfyui": "ComfyUI",
    "diffusers": "diffusers",
    "musubi": "musubi-tuner",
    "sd-scripts": "sd-scripts",
    "lycoris": "LyCORIS",
}
"""The programs that adapter files are for, and what they call themselves. What each reads right is in the records."""


def _importable(name: str) -> str:
    """`config check` already names a package that is broken. Ours import torch, and are not imported for that."""
    EXPORT_FORMATS.check_unique(name)
    if name not in EXPORT_FORMATS.ours:
        EXPORT_FORMATS.load(name)
    return name


if TYPE_CHECKING:
    FormatName = str  # what is installed is not known to a type checker
    Program = str
else:
    Program = Literal[tuple(PROGRAMS)]
    FormatName = Annotated[Literal[FORMAT_NAMES], AfterValidator(_importable)]
