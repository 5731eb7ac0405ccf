"""Opening a dataset with the backend of its type, which is built in or comes from an installed package."""

from __future__ import annotations

from gracetune.config.base import Options
from gracetune.config.dataset_backends import BACKENDS, is_installed, validated
from gracetune.config.dataset_config import Dataset
from gracetune.data.backends.record import DatasetBackend, Opening
from gracetune.data.backends.shared import Storage
from gracetune.errors import ConfigError, Problem


def open_with(opening: Opening) -> Storage:
    """Open a dataset. The options of an installed backend are validated first."""
    dataset = opening.dataset
    record = BACKENDS.load_as(dataset.type, DatasetBackend)
    if not is_installed(dataset.type):
        return record.open(opening)
    options, invalid = validated(dataset.type, options_of(dataset))
    if invalid:
        raise ConfigError([
            Problem(f"dataset {dataset.id}: {'.'.join(map(str, (dataset.type, *one.path)))}", f"{one.found!r}",
                    one.expected, "read the documentation of the package that provides this backend")
            for one in invalid
        ])  # fmt: skip
    found = record.open(Opening(dataset, options, opening.machine, opening.ranks))
    if not isinstance(found, Storage):
        raise BACKENDS.rejected(dataset.type, f"`open` returned a {type(found).__name__}", "a Storage")
    return found


def options_of(dataset: Dataset) -> Options:
    """The config section of an installed backend."""
    options: Options = dict(dataset)[dataset.type]
    return options
