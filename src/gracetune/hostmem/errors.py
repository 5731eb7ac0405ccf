"""Errors of shared host memory."""

from __future__ import annotations

from gracetune.errors import GracetuneError, Problem


class StagingError(GracetuneError):
    """Staged data cannot be made, or another process's cannot be reached."""


class HostMemoryError(GracetuneError):
    """The kernel does not give as much memory, or another process's memory cannot be used."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem
