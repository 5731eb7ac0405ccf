"""What goes wrong while a copy is planned or made. Each message says what was found, expected, and what to type."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

from gracetune.config.spelling import nearest
from gracetune.data.errors import DataError, set_option
from gracetune.errors import Problem
from gracetune.storage.os_errors import problem_of

_GO_ON: Final = "then start again: it goes on"


class CopyError(DataError):
    """A copy cannot be made as it was asked for. What is on the disk already stays for the next start."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))

    @classmethod
    def of(cls, dataset: str, *, found: str, expected: str, hint: str) -> CopyError:
        return cls(Problem(f"dataset {dataset}", found, expected, hint))

    @classmethod
    def of_disk(cls, dataset: str, folder: Path, error: OSError) -> CopyError:
        """This machine's disk does not take the copy."""
        elsewhere = set_option(dataset, "local_copy.folder", "FOLDER")
        return cls(problem_of(error, f"dataset {dataset}", folder, elsewhere=elsewhere, then=_GO_ON))

    @classmethod
    def of_column(cls, dataset: str, column: str, option: str, *, where: str, known: Collection[str]) -> CopyError:
        """A table lacks the column that an option names."""
        near = nearest(column, [*known])
        return cls.of(
            dataset,
            found=f"no column `{column}` in {where}; the columns are {', '.join(known) or 'unnamed'}",
            expected="a column of the dataset",
            hint=set_option(dataset, option, near or "COLUMN"),
        )


class DamagedPartError(Exception):
    """A table or an archive cannot be read to its end. Whoever unpacks it says of which dataset it is."""

    def __init__(self, part: str, reason: str) -> None:
        self.part, self.reason = part, reason
        super().__init__(f"{part}: {reason}")

    def of(self, dataset: str, source: str, remedy: str) -> CopyError:
        found, hint = f"{self.part} of {source}: {self.reason}", f"repair it where it comes from; {remedy}"
        return CopyError.of(dataset, found=found, expected="a file that can be read", hint=hint)
