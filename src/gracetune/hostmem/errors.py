"""Errors of shared host memory."""

from __future__ import annotations

from gracetune.errors import GracetuneError, Problem


class StagingError(GracetuneError):
    """Data cannot be staged, or the data another process staged cannot be used."""


class HostMemoryError(GracetuneError):
    """The kernel rejects an allocation, or the memory of another process cannot be used."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem
