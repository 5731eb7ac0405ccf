"""Errors of shared host memory."""

from __future__ import annotations

from gracetune.errors import GracetuneError


class StagingError(GracetuneError):
    """Staged data cannot be made, or another process's cannot be reached."""
