"""Where a run begins: `latest`, `none`, or a checkpoint's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gracetune.checkpoint.errors import ResumeError, listed, unreadable
from gracetune.checkpoint.folder import checkpoints
from gracetune.checkpoint.manifest import MANIFEST, has_unknown_parts, step_of
from gracetune.checkpoint.reading import Checkpoint
from gracetune.checkpoint.store import CheckpointStore
from gracetune.errors import Problem

_UNKNOWN_PARTS = (
    "is of an earlier release, which recorded only the trained weights: whether VAE, text encoders, tokenizers and "
    "scheduler are the same as then is not known; from the next checkpoint on it is checked"
)


@dataclass(frozen=True)
class Start:
    """Where a run begins, and why."""

    checkpoint: Checkpoint | None
    """None: at step 0."""
    reason: str
    notes: tuple[str, ...] = ()
    """What the user should know."""
    newest: int = 0
    """Step of the newest checkpoint that the folder held: a run that finished there did so at this step."""

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step


def begin(
    asked: str, store: CheckpointStore, identity: Mapping[str, str], *, allow_other_run: bool = False, take: bool = True
) -> Start:
    """Find, check and open the checkpoint that was asked for, and take the folder for this run. Called by all ranks.

    `allow_other_run` takes over the state of a checkpoint made by another run; the folder itself must still be this
    run's own. Without `take` nothing in the folder is locked, renamed or made: for whoever only wants to look.
    """
    path, reason = resolve(asked, store)
    latest = store.latest()
    newest = 0 if latest is None else step_of(latest.name) or 0
    checkpoint: Checkpoint | None = None
    notes: tuple[str, ...] = ()
    if path is not None:
        checkpoint = store.open(path)
        different = checkpoint.differences(identity)
        if different and not allow_other_run:
            checkpoint.refuse_other_run(identity)
        notes = tuple(f"{path.name} is of another run: {line}" for line in different)
        if has_unknown_parts(checkpoint.manifest.metadata.identity, identity):
            notes += (f"{path.name} {_UNKNOWN_PARTS}",)
    if take:
        return Start(checkpoint, reason, notes + store.begin(identity, checkpoint), newest)
    store.refuse_others(identity)
    return Start(checkpoint, reason, notes, newest)


def resolve(asked: str, store: CheckpointStore) -> tuple[Path | None, str]:
    """The folder that is meant, and why; nothing in it has been read."""
    if asked == "none":
        return None, "begins anew, as asked"
    if asked == "latest":
        path = store.latest()
        if path is None:
            return None, f"begins anew: no checkpoint in {store.folder}"
        return path, f"goes on from {path.name}, the latest"
    path = Path(asked).expanduser().absolute()
    try:
        if (path / MANIFEST).is_file() or (path.is_dir() and step_of(path.name) is not None):
            return path, f"goes on from {path}, as asked"
        raise _no_checkpoint(asked, path, store)
    except OSError as error:
        raise unreadable(error, path) from error


def _no_checkpoint(asked: str, path: Path, store: CheckpointStore) -> ResumeError:
    found = "a file" if path.is_file() else "a folder that is no checkpoint" if path.is_dir() else "nothing there"
    for folder in (path, path / "checkpoints", path.parent, store.folder):
        there = checkpoints(folder) if folder.is_dir() else []
        if there:
            named = next((one.path for one in there if one.path.name == path.name), there[-1].path)
            found += f"; {folder} holds {listed(one.path.name for one in there)}"
            hint = f"--resume {named}"
            break
    else:
        hint = "--resume latest (which begins anew where there is no checkpoint), or --resume none"
    return ResumeError(
        Problem(f"resume {asked!r}", found, "latest, none, or the folder of a checkpoint", hint, str(path))
    )
