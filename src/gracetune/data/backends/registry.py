"""All dataset backends: ours, one line each, and those of installed packages."""

from __future__ import annotations

from typing import Final

from gracetune.config.base import Options
from gracetune.config.dataset_backends import INSTALLED, InstalledBackends, refused
from gracetune.config.dataset_config import Dataset
from gracetune.data.backends import local, url
from gracetune.data.backends.record import DatasetBackend, Opening
from gracetune.data.backends.shared import Storage
from gracetune.data.staging import opening as staged
from gracetune.errors import ConfigError, Problem

_RECORDS: Final = (
    local.BACKEND,
    url.BACKEND,
    staged.BACKEND,
)
OURS: Final = {record.name: record for record in _RECORDS}


def open_with(opening: Opening, installed: InstalledBackends = INSTALLED) -> Storage:
    """Open a dataset with the backend of its type."""
    dataset = opening.dataset
    if dataset.type in OURS:
        return OURS[dataset.type].open(opening)
    record = installed.load(dataset.type)
    if not isinstance(record, DatasetBackend):
        raise refused(dataset.type, f"{record!r}", "a DatasetBackend")
    options, invalid = installed.validated(dataset.type, options_of(dataset))
    if invalid:
        raise ConfigError([
            Problem(f"dataset {dataset.id}: {'.'.join(map(str, (dataset.type, *one.path)))}", f"{one.found!r}",
                    one.expected, "look at the documentation of the package that brings this backend")
            for one in invalid
        ])  # fmt: skip
    found = record.open(Opening(dataset, options, opening.machine, opening.ranks))
    if not isinstance(found, Storage):
        raise refused(dataset.type, f"`open` gave a {type(found).__name__}", "a Storage")
    return found


def options_of(dataset: Dataset) -> Options:
    """What a config says in the section of an installed backend."""
    given: Options = dict(dataset)[dataset.type]
    return given
