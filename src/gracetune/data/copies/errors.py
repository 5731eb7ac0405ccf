"""Errors of planning and making a copy. Each message says what was found, what was expected and what to type."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

from gracetune.config.spelling import nearest
from gracetune.data.errors import DataError, set_option
from gracetune.errors import Problem
from gracetune.storage.os_errors import problem_of

_GO_ON: Final = "then start again: it continues where it stopped"


class CopyError(DataError):
    """A copy cannot be made. Data already on disk is kept for the next start."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))

    @classmethod
    def of(cls, dataset: str, *, found: str, expected: str, hint: str) -> CopyError:
        return cls(Problem(f"dataset {dataset}", found, expected, hint))

    @classmethod
    def of_disk(cls, dataset: str, folder: Path, error: OSError) -> CopyError:
        """The error for a copy that this machine's disk cannot store."""
        elsewhere = set_option(dataset, "local_copy.folder", "FOLDER")
        return cls(problem_of(error, f"dataset {dataset}", folder, elsewhere=elsewhere, then=_GO_ON))

    @classmethod
    def of_column(
        cls, dataset: str, column: str, option: str, *, location: str, supported: Collection[str]
    ) -> CopyError:
        """The error for a table without the column that an option names."""
        near = nearest(column, [*supported])
        return cls.of(
            dataset,
            found=f"no column `{column}` in {location}; the columns are {', '.join(supported) or 'unnamed'}",
            expected="a column of the dataset",
            hint=set_option(dataset, option, near or "COLUMN"),
        )


class DamagedPartError(Exception):
    """A table or an archive cannot be read to its end. The caller adds the dataset with `of`."""

    def __init__(self, part: str, reason: str) -> None:
        self.part, self.reason = part, reason
        super().__init__(f"{part}: {reason}")

    def of(self, dataset: str, source: str, remedy: str) -> CopyError:
        found, hint = f"{self.part} of {source}: {self.reason}", f"repair it at its source; {remedy}"
        return CopyError.of(dataset, found=found, expected="a file that can be read", hint=hint)
