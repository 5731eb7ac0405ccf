"""Errors of datasets. Each names the dataset and the file."""

from __future__ import annotations

import shlex

from gracetune.errors import GracetuneError


def set_option(dataset: str, option: str, value: str) -> str:
    """The command line argument that sets an option of a dataset."""
    return f"--set {shlex.quote(f'datasets[{dataset}].{option}={value}')}"


class DataError(GracetuneError):
    """A dataset cannot be used as it is. The message names the file and the remedy."""


class MissingFileError(DataError):
    """The file does not exist in the backend."""


class OutsideRootError(DataError):
    """A path leads out of the dataset's folder."""


class UnreadableMediaError(DataError):
    """A file cannot be read or decoded. It is counted and left out, up to the dataset's `corrupt_threshold`."""

    def __init__(self, path: str, reason: str, dataset: str | None = None) -> None:
        """`dataset` is the id of the file's dataset, if known: a reference may have the same path as its target."""
        super().__init__(f"{path}: {reason}" if dataset is None else f"dataset {dataset}: {path}: {reason}")
        self.path, self.reason, self.dataset = path, reason, dataset
