"""The record of a dataset backend: its name, its options and how it is opened.

A backend is one file: a class that reads a dataset's files (`gracetune.data.backend.Backend` is the contract,
`gracetune.data.backends.shared.Storage` the part of it that is the same for all), and a `DatasetBackend`. Ours are
listed in `registry`; others come as installed packages (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from gracetune.data.backends.shared import Storage
from gracetune.data.staging.progress import OnProgress, unwatched

if TYPE_CHECKING:  # a process that only reads files should not wait for the configuration's code (scan_workers.py)
    from gracetune.config.dataset_config import Dataset
    from gracetune.data.staging.selection import Selection
    from gracetune.hardware import Machine
    from gracetune.hostmem.sharing import LocalRanks


@dataclass(frozen=True)
class Opening:
    """Everything a backend may need to open a dataset."""

    dataset: Dataset
    options: Any = None
    """An instance of the record's own model; None for a record without one."""
    machine: Machine | None = None
    ranks: LocalRanks | None = None
    """The processes of this machine that run together; None for one process."""
    on_progress: OnProgress = unwatched
    selection: Selection | None = None
    """The files to stage; None means those the dataset needs."""


@dataclass(frozen=True)
class DatasetBackend:
    name: str
    """What a config writes as the dataset's `type`."""
    open: Callable[[Opening], Storage]
    """The backend of one dataset. The caller closes it."""
    options: type[BaseModel] | None = None
    """Checks the dataset's section of the backend's name. It should forbid extra keys."""
