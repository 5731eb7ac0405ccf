"""Errors of weight files."""

from __future__ import annotations

from collections.abc import Iterable

from gracetune.errors import GracetuneError, Problem


class WeightFileError(GracetuneError):
    """Weights cannot be read into the place prepared for them; carries all of the problems, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        if not self.problems:
            raise ValueError("a WeightFileError without problems would tell the user nothing")
        super().__init__("\n".join(str(problem) for problem in self.problems))
