"""Resuming: find the checkpoint that a run starts from, given `latest`, `none` or a checkpoint's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gracetune.checkpoint.errors import ResumeError, list_names, read_error
from gracetune.checkpoint.folder import checkpoints
from gracetune.checkpoint.manifest import MANIFEST, has_unknown_parts, step_of
from gracetune.checkpoint.reading import Checkpoint
from gracetune.checkpoint.store import CheckpointStore
from gracetune.errors import Problem

_UNKNOWN_PARTS = (
    "was written by an earlier release, which recorded only the trained weights, so it is unknown whether VAE, text "
    "encoders, tokenizers and scheduler are the same; from the next checkpoint on they are checked"
)


@dataclass(frozen=True)
class ResumeStart:
    """The step that a run starts at, and why."""

    checkpoint: Checkpoint | None
    """None if the run starts at step 0."""
    reason: str
    notes: tuple[str, ...] = ()
    """Notes for the user."""
    newest: int = 0
    """Step of the newest checkpoint in the folder, which is the last step of a finished run; 0 if there is none."""

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step


def open_requested(
    requested: str, store: CheckpointStore, identity: Mapping[str, str], *, allow_other_run: bool = False
) -> ResumeStart:
    """Verify and open the requested checkpoint. All ranks call this. Changes nothing: `CheckpointStore.begin` takes the
    folder afterwards.

    Raises OtherRunError if the checkpoint is of another run (unless `allow_other_run`), or if the folder contains
    checkpoints of another run.
    """
    path, reason = resolve(requested, store)
    latest = store.latest()
    newest = 0 if latest is None else step_of(latest.name) or 0
    checkpoint: Checkpoint | None = None
    notes: tuple[str, ...] = ()
    if path is not None:
        checkpoint = store.open(path)
        different = checkpoint.differences(identity)
        if different and not allow_other_run:
            checkpoint.reject_other_run(identity)
        notes = tuple(f"{path.name} belongs to another run: {line}" for line in different)
        if has_unknown_parts(checkpoint.manifest.metadata.identity, identity):
            notes += (f"{path.name} {_UNKNOWN_PARTS}",)
    store.reject_others(identity)
    return ResumeStart(checkpoint, reason, notes, newest)


def resolve(requested: str, store: CheckpointStore) -> tuple[Path | None, str]:
    """The folder of the requested checkpoint, and why. The checkpoint itself is not read."""
    if requested == "none":
        return None, "starts at step 0, as requested"
    if requested == "latest":
        path = store.latest()
        if path is None:
            return None, f"starts at step 0: no checkpoint in {store.folder}"
        return path, f"resumes from {path.name}, the latest"
    path = Path(requested).expanduser().absolute()
    try:
        if (path / MANIFEST).is_file() or (path.is_dir() and step_of(path.name) is not None):
            return path, f"resumes from {path}, as requested"
        raise _no_checkpoint(requested, path, store)
    except OSError as error:
        raise read_error(error, path) from error


def _no_checkpoint(requested: str, path: Path, store: CheckpointStore) -> ResumeError:
    found = "a file" if path.is_file() else "a folder that is not a checkpoint" if path.is_dir() else "no such folder"
    for folder in (path, path / "checkpoints", path.parent, store.folder):
        existing = checkpoints(folder) if folder.is_dir() else []
        if existing:
            suggestion = next((one.path for one in existing if one.path.name == path.name), existing[-1].path)
            found += f"; {folder} contains {list_names(one.path.name for one in existing)}"
            hint = f"--resume {suggestion}"
            break
    else:
        hint = "--resume latest (which starts at step 0 if there is no checkpoint), or --resume none"
    return ResumeError(
        Problem(f"resume {requested!r}", found, "latest, none, or the folder of a checkpoint", hint, str(path))
    )
