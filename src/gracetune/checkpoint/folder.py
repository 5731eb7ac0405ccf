"""The contents of a checkpoint folder, and the retention rules. Foreign files are never changed.

checkpoint-<step>/           complete checkpoints (see `manifest`)
set-aside-checkpoint-<step>/ checkpoints after the step that a run resumed from; never read, never deleted
.gracetune-<32 hex>.tmp/     being written or deleted; if a process was killed, the next run removes it
.gracetune.lock              locked by the process that writes; its first line is the journal (see `journal`)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gracetune.checkpoint.errors import BusyFolderError, listed, unreadable
from gracetune.checkpoint.journal import Journal
from gracetune.checkpoint.manifest import (
    MANIFEST,
    BadManifestError,
    CheckpointManifest,
    identity_differences,
    read_manifest,
    step_of,
)
from gracetune.errors import Problem
from gracetune.storage.atomic import sync_folder, temporary_name
from gracetune.storage.locks import lock, open_lock_file
from gracetune.storage.os_errors import explain

LOCK_FILE = ".gracetune.lock"
_ASIDE = "set-aside-"


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder with the name of a checkpoint. Its content was not read."""

    step: int
    path: Path


def checkpoints(folder: Path) -> list[CheckpointFolder]:
    """All checkpoints in a folder, the oldest first. Empty if the folder does not exist."""
    try:
        found = [(step_of(path.name), path) for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(error, folder) from error
    return sorted((CheckpointFolder(step, path) for step, path in found if step is not None), key=lambda one: one.step)


def manifest_if_ours(path: Path, identity: Mapping[str, str]) -> CheckpointManifest | None:
    """The manifest; None if it is damaged or unreadable, of another run, or contradicts the folder's name."""
    try:
        return _manifest_of_run(path, identity)
    except OSError:
        return None


def _manifest_of_run(path: Path, identity: Mapping[str, str]) -> CheckpointManifest | None:
    """The same, but an unreadable manifest raises OSError."""
    try:
        manifest = read_manifest(path)
    except BadManifestError:
        return None
    different = identity_differences(manifest.metadata.identity, identity)
    return manifest if not different and manifest.step == step_of(path.name) else None


def take_lock(folder: Path) -> tuple[int, bool]:
    """Lock the folder until the returned descriptor is closed. The flag is False if locks are unsupported."""
    descriptor = open_lock_file(folder / LOCK_FILE)
    result = lock(descriptor, exclusive=True)
    if result == "busy":
        os.close(descriptor)
        raise _busy(folder)
    return descriptor, result == "held"


def check_lock(folder: Path) -> None:
    """Raise BusyFolderError if another process holds the folder. Takes a shared lock only for a moment."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if lock(descriptor, exclusive=False) == "busy":
            raise _busy(folder)
    finally:
        os.close(descriptor)


def _busy(folder: Path) -> BusyFolderError:
    return BusyFolderError(
        Problem(
            "another process writes checkpoints here",
            f"a process that has locked {LOCK_FILE}",
            "one run per output folder",
            f"wait for it or stop it (`fuser {folder / LOCK_FILE}` shows its id), or set another output_dir",
            str(folder),
        )
    )


@contextmanager
def temporary_folder(folder: Path) -> Iterator[None]:
    """Create the folder and its parents, and remove them again afterwards. For checks that must leave no trace."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in missing:
            with suppress(OSError):  # it was not created, or another process has created files in it
                path.rmdir()


# -- retention --------------------------------------------------------------------------------------------------------


def superfluous(steps: Iterable[int], keep_last: int, keep_every: int | None) -> tuple[int, ...]:
    """The steps whose checkpoints should not be kept. Pure."""
    ordered = sorted(set(steps))
    kept = set(ordered[-keep_last:])
    if keep_every is not None:
        kept.update(step for step in ordered if step % keep_every == 0)
    return tuple(step for step in ordered if step not in kept)


@dataclass(frozen=True)
class CheckpointRemoval:
    """The names of deleted checkpoints, and notes for the user."""

    removed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def remove_superfluous(
    folder: Path, identity: Mapping[str, str], keep_last: int, keep_every: int | None, protected: Sequence[int],
    journal: Journal,
) -> CheckpointRemoval:  # fmt: skip
    """Delete checkpoints of this run according to the retention rules. Failures to delete are reported as notes.

    Deleted steps stay in the journal as `retiring` until their weights are deleted too.
    """
    ours: dict[int, tuple[Path, CheckpointManifest]] = {}
    for one in checkpoints(folder):
        try:
            manifest = _manifest_of_run(one.path, identity)
        except OSError:
            journal.begin("retiring", one.step)  # the next start decides whether to keep it
            continue
        if manifest is not None:
            ours[one.step] = (one.path, manifest)
    removed, notes = [], []
    for step in superfluous(ours, keep_last, keep_every):
        if step in protected:
            continue
        path, manifest = ours[step]
        journal.begin("retiring", step)  # if this fails, the next start tries again
        try:
            foreign = {entry.name for entry in path.iterdir()} - {MANIFEST, *manifest.files}
            if foreign:
                notes.append(f"{path} is not deleted, because it contains other files: {listed(sorted(foreign))}")
                journal.end("retiring", step)
                continue
            _delete(folder, path)
        except OSError as error:
            notes.append(f"{path} could not be deleted: {explain(error, path).found}")
            continue
        removed.append(path.name)
    return CheckpointRemoval(tuple(removed), tuple(notes))


def _delete(folder: Path, path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that no process sees a partially deleted one."""
    trash = folder / temporary_name()
    path.rename(trash)
    with suppress(OSError):  # the next start removes what is left
        sync_folder(folder)
        shutil.rmtree(trash)


def set_aside(folder: Path, later: Sequence[CheckpointFolder]) -> tuple[str, ...]:
    """Rename later checkpoints, so that `latest` never selects one of an abandoned branch. Returns notes."""
    notes = []
    for one in later:
        target = _free_name(folder, f"{_ASIDE}{one.path.name}")
        one.path.rename(target)
        notes.append(f"{one.path.name} is later than the step this run starts at; it was renamed to {target.name}")
    if later:
        sync_folder(folder)
    return tuple(notes)


def _free_name(folder: Path, name: str) -> Path:
    path, number = folder / name, 1
    while path.exists() or path.is_symlink():
        number += 1
        path = folder / f"{name}-{number}"
    return path
