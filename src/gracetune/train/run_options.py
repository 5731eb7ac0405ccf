"""What is said about a run and not about its result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunOptions:
    resume: str | None = None
    """`latest`, `none` or a checkpoint; None takes the config's."""
    dry_run: bool = False
    allow_other_data: bool = False
    allow_other_run: bool = False
    allow_misfit: bool = False
    """Begin although the memory plan says that it does not fit."""
    force_oversubscription: bool = False
    """Lift the cap on managed memory on a machine without a coherent link; that can hang its driver."""
    report: bool = True
    """Write the report of the whole run at its end, and say where it is."""
