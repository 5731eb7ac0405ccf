"""Request a validation from a running job, from another process."""

from __future__ import annotations

import os
from pathlib import Path

from gracetune.checkpoint.folder import LOCK_FILE
from gracetune.errors import ConfigError, Problem
from gracetune.storage.locks import lock

VALIDATE_NOW = "validate-now"
"""A file of this name in a run's folder requests a validation. The job removes it."""


def ask_for_validation(run_folder: Path) -> str:
    """Create the request file, and return a line for the user."""
    folder = run_folder.expanduser().absolute()
    if not (folder / "checkpoints").is_dir():
        problem = "no such folder" if not folder.is_dir() else "a folder without checkpoints/"
        raise ConfigError([Problem("RUN", problem, "the output folder of a run", "check the path", str(folder))])
    if not is_running(folder):
        hint = "gracetune train CONFIG --set validation.at_start=true generates samples when a run starts"
        raise ConfigError([Problem("RUN", "no run is active here", "a running job", hint, str(folder))])
    (folder / VALIDATE_NOW).touch()
    return f"requested: samples will appear in {folder / 'samples'} after the current step"


def is_running(folder: Path) -> bool:
    """Whether a run uses this folder: it holds a lock on its checkpoints while its process lives."""
    try:
        descriptor = os.open(folder / "checkpoints" / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return lock(descriptor, exclusive=True) == "busy"
    finally:
        os.close(descriptor)
