"""Options of one invocation. Unlike the config, they do not change what is trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunOptions:
    resume: str | None = None
    """`latest`, `none` or the path of a checkpoint; None takes the config's value."""
    dry_run: bool = False
    """Plan, load and try one batch, but train nothing."""
    allow_other_data: bool = False
    """Resume even if the data differs from the checkpoint's."""
    allow_other_run: bool = False
    """Resume even if the model or the adapter differs from the checkpoint's."""
    allow_misfit: bool = False
    """Start even if the memory plan says that the run does not fit."""
    force_oversubscription: bool = False
    """Lift the cap on managed memory on a machine without a coherent link. This can hang its driver."""
    default_samples: bool = False
    """Generate samples of captions if the config has no prompts (`train.default_samples`)."""
    report: bool = True
    """Write `report.html` at the end of the run."""
