"""One record per export format. `config/export_formats.py` lists them.

A record also lists the programs that read such files and the layers that each of them reads wrongly. `programs.py` asks
it for `gracetune adapter convert`, `inspect` and `verify`, for the export of a run, and for the table in
docs/adapters.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gracetune.adapters.formats.reading import AdapterContents
from gracetune.adapters.formats.writing import Fault, Written
from gracetune.adapters.state import AdapterState
from gracetune.config.export_formats import Program

Reader = Callable[[AdapterState], Iterable[Fault]]
"""The layers of a state that a program would load wrongly, or not at all, from a file of the format."""


@dataclass(frozen=True)
class Format:
    write: Callable[[AdapterState, torch.dtype], Written]
    """Raises `CannotHoldError` for what the format has no place for."""
    read: Callable[[Mapping[str, Tensor], Mapping[str, str], str], AdapterContents]
    """Understands every spelling; differs in what a file means that does not say its scale."""
    readers: Mapping[Program, Reader] = field(default_factory=dict)
    """Programs that read such files of all families, or of those that list them (`KeyMap.also_read_by`)."""
    made_for: tuple[Program, ...] = ()
    """The programs that a user of this format expects to load the file: it is right in all of them, or rejected."""
    all_families: tuple[Program, ...] = ()
    """Those of `readers` that know the names of every family."""
    keeps_all: bool = False
    """Adapters that no program loads are kept in this format, to train on from or to merge."""
    alpha_is_optional: bool = False
    """Its programs take a layer without alpha for one of scale 1."""
