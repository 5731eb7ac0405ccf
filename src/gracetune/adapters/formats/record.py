"""One record per export format. `config/export_formats.py` lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gracetune.adapters.formats.reading import Reading
from gracetune.adapters.formats.writing import Written
from gracetune.adapters.state import AdapterState


@dataclass(frozen=True)
class Format:
    write: Callable[[AdapterState, torch.dtype], Written]
    """Raises `CannotHoldError` for what the format has no place for."""
    read: Callable[[Mapping[str, Tensor], Mapping[str, str], str], Reading]
    """Understands every spelling; differs in what a file means that does not say its scale."""
