"""The four formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from gracetune.adapters.formats import comfyui, diffusers, kohya, lycoris
from gracetune.adapters.formats.reading import Reading
from gracetune.adapters.formats.writing import FormatName, Written
from gracetune.adapters.state import AdapterState


@dataclass(frozen=True)
class Format:
    name: FormatName
    write: Callable[[AdapterState, torch.dtype], Written]
    """Raises `CannotHoldError` for what the format has no place for."""
    read: Callable[[Mapping[str, Tensor], Mapping[str, str], str], Reading]
    """Understands every spelling; differs in what a file means that does not say its scale."""


FORMATS: MappingProxyType[FormatName, Format] = MappingProxyType(
    {
        "comfyui": Format("comfyui", comfyui.write, comfyui.read),
        "diffusers": Format("diffusers", diffusers.write, diffusers.read),
        "kohya": Format("kohya", kohya.write, kohya.read),
        "lycoris": Format("lycoris", lycoris.write, lycoris.read),
    }
)
