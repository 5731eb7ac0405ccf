"""What goes wrong with data. Each names the dataset and the file."""

from __future__ import annotations

import shlex

from gracetune.errors import GracetuneError


def set_option(dataset: str, option: str, value: str) -> str:
    """What to type so that a dataset's option has this value."""
    return f"--set {shlex.quote(f'datasets[{dataset}].{option}={value}')}"


class DataError(GracetuneError):
    """A dataset cannot be used as it is; the message says which file and what to do."""


class MissingFileError(DataError):
    """A backend has no such file."""


class OutsideRootError(DataError):
    """A path leads out of the dataset's folder."""


class UnreadableMediaError(DataError):
    """One file cannot be decoded. Counted and left out up to the dataset's `corrupt_threshold`."""

    def __init__(self, path: str, reason: str, dataset: str | None = None) -> None:
        """`dataset` is the id of the one it belongs to, where that is known: a reference may have its target's name."""
        super().__init__(f"{path}: {reason}" if dataset is None else f"dataset {dataset}: {path}: {reason}")
        self.path, self.reason, self.dataset = path, reason, dataset
