"""The record of an export format. `config/registry.py` lists the records.

A record also lists the programs that read such files and the layers that each of them loads wrongly. `programs.py` uses
this for `gracetune adapter convert`, `inspect` and `verify`, for the export of a run, and for the table in
docs/adapters.md.

`FORMATS` has the records by name. Each is imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from gracetune.adapters.formats.reading import AdapterContents
from gracetune.adapters.formats.writing import Fault, FileContents
from gracetune.adapters.state import AdapterState
from gracetune.config.registry import EXPORT_FORMATS, FORMAT_NAMES, Program

Reader = Callable[[AdapterState], Iterable[Fault]]
"""The layers of a state that a program would load wrongly, or not at all, from a file of the format."""


@dataclass(frozen=True)
class Format:
    write: Callable[[AdapterState, torch.dtype], FileContents]
    """Tensors and header entries of the file. Raises `CannotHoldError` if the format cannot represent the adapter."""
    read: Callable[[Mapping[str, Tensor], Mapping[str, str], str], AdapterContents]
    """Understands the keys of every format. Formats differ in the scale of a file that does not define one."""
    readers: Mapping[Program, Reader] = field(default_factory=dict)
    """Programs that read such files, for all families or for those that list the program (`KeyMap.also_read_by`)."""
    made_for: tuple[Program, ...] = ()
    """The programs that a user of this format expects to load the file. A file that one of them would load wrongly is
    rejected."""
    all_families: tuple[Program, ...] = ()
    """The programs in `readers` that know the keys of every family."""
    keeps_all: bool = False
    """Whether adapters that no program loads may be saved in this format, to train on from them or to merge them."""
    dora_by_base: bool = False
    """Whether DoRA's row magnitudes are stored relative to the base weights (`delta.with_base_magnitude`)."""
    alpha_is_optional: bool = False
    """Whether its programs load a layer without alpha with a scale of 1."""


class _Formats(Mapping[str, Format]):
    def __getitem__(self, name: str) -> Format:
        return EXPORT_FORMATS.load_as(name, Format)

    def __iter__(self) -> Iterator[str]:
        return iter(FORMAT_NAMES)

    def __len__(self) -> int:
        return len(FORMAT_NAMES)


FORMATS: Final[Mapping[str, Format]] = _Formats()
