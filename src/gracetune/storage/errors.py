"""Errors of weight files."""

from __future__ import annotations

from collections.abc import Iterable

from gracetune.errors import GracetuneError, Problem


class WeightFileError(GracetuneError):
    """A weight file cannot be read, or does not fit the model. Carries all problems, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        if not self.problems:
            raise ValueError("a WeightFileError needs at least one problem to report")
        super().__init__("\n".join(str(problem) for problem in self.problems))
