"""The file formats for adapters that `checkpoints.format` can name. Their records are in `adapters/formats/`."""

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
"""The programs that load adapter files -> their own spelling. The records say which files each one loads correctly."""


def _importable(name: str) -> str:
    """Let `config check` report a broken package. Our own records import torch, so they are not imported here."""
    EXPORT_FORMATS.check_unique(name)
    if name not in EXPORT_FORMATS.ours:
        EXPORT_FORMATS.load(name)
    return name


if TYPE_CHECKING:
    FormatName = str  # a type checker cannot know which packages are installed
    Program = str
else:
    Program = Literal[tuple(PROGRAMS)]
    FormatName = Annotated[Literal[FORMAT_NAMES], AfterValidator(_importable)]
