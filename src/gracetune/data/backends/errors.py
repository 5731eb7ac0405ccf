"""Errors of storage and staging. Each message says what was found, what was expected and what to type."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from gracetune.data.backend import LeftOut
from gracetune.data.errors import DataError, set_option
from gracetune.errors import Problem

SHOWN = 20
"""The number of files printed from a long list. The error's `files` holds all of them."""


class StorageError(DataError):
    """A folder or URL cannot be opened, listed or written to."""


class MemoryLimitError(DataError):
    """The files do not fit into `memory_limit_gb`, the control group or main memory. All memory is released again."""


class UnreadableFilesError(DataError):
    """More files are unreadable than `corrupt_threshold` allows."""

    def __init__(self, dataset: str, files: Iterable[LeftOut], *, total: int, threshold: float) -> None:
        self.files = tuple(files)
        shown = "".join(f"\n    {file.path}: {file.reason}" for file in self.files[:SHOWN])
        more = f"\n    ... and {len(self.files) - SHOWN} more" if len(self.files) > SHOWN else ""
        problem = Problem(
            key=f"dataset {dataset}: unreadable files",
            found=f"{len(self.files)} of {total}",
            expected=f"at most {threshold:.3g} of them (corrupt_threshold)",
            hint=f"repair or remove the files below{leave_out(dataset, len(self.files), total)}",
        )
        super().__init__(f"{problem}{shown}{more}")


def leave_out(dataset: str, count: int, total: int) -> str:
    """The end of a hint: how to train on the other files, if there are any."""
    if count >= total:
        return ""
    share = math.ceil(count / total * 1000) / 1000  # rounded up, so that it allows `count` files
    return f"; to leave them out, {set_option(dataset, 'corrupt_threshold', f'{share:g}')}"


def too_many(count: int, total: int, share: float) -> bool:
    """Whether more than a share of the files failed. Exact arithmetic: 0.29 of 100 is 29, not 28.999…"""
    return count > Fraction(str(share)) * total


def problem_text(key: str, *, found: str, expected: str, hint: str) -> str:
    """The text of an error message in the common form: key, found, expected, hint."""
    return str(Problem(key, found, expected, hint))
