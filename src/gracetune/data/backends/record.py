"""The record of a dataset backend: its name, its options and how to open it.

A backend is one file with two parts: a subclass of `gracetune.data.backends.storage.Storage`, which implements the
interface `gracetune.data.backend.Backend`, and a `DatasetBackend` record. Built-in backends are found through
`gracetune.config.registry.BACKENDS`; others come from installed packages (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from gracetune.data.backends.storage import Storage
from gracetune.data.staging.report import OnProgress, unwatched

if TYPE_CHECKING:  # keeps the configuration's code out of worker processes, which start faster (scan_workers.py)
    from gracetune.config.dataset_config import Dataset
    from gracetune.data.staging.file_selection import ExtensionSelection
    from gracetune.hardware import Machine
    from gracetune.hostmem.sharing import LocalRanks


@dataclass(frozen=True)
class Opening:
    """The arguments for opening a dataset."""

    dataset: Dataset
    options: Any = None
    """The validated options, an instance of the record's `options` model; None for a record without options."""
    machine: Machine | None = None
    ranks: LocalRanks | None = None
    """The local processes of the launch; None for a single process."""
    on_progress: OnProgress = unwatched
    selection: ExtensionSelection | None = None
    """The files to stage; None stages those the dataset needs."""


@dataclass(frozen=True)
class DatasetBackend:
    name: str
    """The dataset `type` in a config."""
    open: Callable[[Opening], Storage]
    """Opens the backend of a dataset. The caller must close it."""
    options: type[BaseModel] | None = None
    """Validates the dataset's section with the backend's name. It should forbid extra keys."""
