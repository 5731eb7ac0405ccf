"""What lies in a folder of checkpoints, and which of it may be deleted. What is not ours is never touched.

checkpoint-<step>/           whole checkpoints (see `manifest`)
set-aside-checkpoint-<step>/ later than the step a run was resumed from; never read, never deleted
.gracetune-<32 hex>.tmp/     being written, or being deleted; removed by the next run if a process left it
.gracetune.lock              held by the process that writes; its first line is the journal (see `journal`)
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
    Manifest,
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
class Found:
    """A folder with the name of a checkpoint; nobody has looked into it yet."""

    step: int
    path: Path


def checkpoints(folder: Path) -> list[Found]:
    """The oldest first; empty where there is no such folder."""
    try:
        found = [(step_of(path.name), path) for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(error, folder) from error
    return sorted((Found(step, path) for step, path in found if step is not None), key=lambda one: one.step)


def manifest_if_ours(path: Path, identity: Mapping[str, str]) -> Manifest | None:
    """None where it is damaged, of another run, or not what its name says."""
    try:
        return _manifest_of_run(path, identity)
    except OSError:
        return None


def _manifest_of_run(path: Path, identity: Mapping[str, str]) -> Manifest | None:
    """OSError where it cannot be read."""
    try:
        manifest = read_manifest(path)
    except BadManifestError:
        return None
    different = identity_differences(manifest.metadata.identity, identity)
    return manifest if not different and manifest.step == step_of(path.name) else None


def take_lock(folder: Path) -> tuple[int, bool]:
    """A descriptor that holds the folder until it is closed; False where the disk knows no locks."""
    descriptor = open_lock_file(folder / LOCK_FILE)
    grip = lock(descriptor, exclusive=True)
    if grip == "busy":
        os.close(descriptor)
        raise _busy(folder)
    return descriptor, grip == "held"


def check_lock(folder: Path) -> None:
    """BusyFolderError where another process holds the folder. Takes nothing: a shared lock, for a moment."""
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
            f"a process that holds {LOCK_FILE}",
            "one run for each output folder",
            f"wait for it or stop it (`fuser {folder / LOCK_FILE}` names it), or set another output_dir",
            str(folder),
        )
    )


@contextmanager
def temporary_folder(folder: Path) -> Iterator[None]:
    """Inside, the folder exists. Afterwards, what was made for that is gone again: for checks that leave no trace."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in missing:
            with suppress(OSError):  # it was not made, or another process has put something into it
                path.rmdir()


# -- retention --------------------------------------------------------------------------------------------------------


def superfluous(steps: Iterable[int], keep_last: int, keep_every: int | None) -> tuple[int, ...]:
    """Which of these steps' checkpoints are not to be kept. Pure."""
    ordered = sorted(set(steps))
    kept = set(ordered[-keep_last:])
    if keep_every is not None:
        kept.update(step for step in ordered if step % keep_every == 0)
    return tuple(step for step in ordered if step not in kept)


@dataclass(frozen=True)
class Removal:
    removed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def remove_superfluous(
    folder: Path, identity: Mapping[str, str], keep_last: int, keep_every: int | None, protected: Sequence[int],
    journal: Journal,
) -> Removal:  # fmt: skip
    """Delete whole checkpoints of this run that are not to be kept. What cannot be deleted stays, with a note.

    Those that are deleted stay in the journal as `retiring`, until their weights are deleted too.
    """
    ours: dict[int, tuple[Path, Manifest]] = {}
    for one in checkpoints(folder):
        try:
            manifest = _manifest_of_run(one.path, identity)
        except OSError:
            journal.begin("retiring", one.step)  # whether it is to be kept, the next start finds out
            continue
        if manifest is not None:
            ours[one.step] = (one.path, manifest)
    removed, notes = [], []
    for step in superfluous(ours, keep_last, keep_every):
        if step in protected:
            continue
        path, manifest = ours[step]
        journal.begin("retiring", step)  # what fails now, the next start tries again
        try:
            strangers = {entry.name for entry in path.iterdir()} - {MANIFEST, *manifest.files}
            if strangers:
                notes.append(f"{path} is not deleted: it holds files that are not ours: {listed(sorted(strangers))}")
                journal.end("retiring", step)
                continue
            _delete(folder, path)
        except OSError as error:
            notes.append(f"{path} could not be deleted: {explain(error, path).found}")
            continue
        removed.append(path.name)
    return Removal(tuple(removed), tuple(notes))


def _delete(folder: Path, path: Path) -> None:
    """Out of sight in one step, so that nobody ever sees half of it; then for good."""
    trash = folder / temporary_name()
    path.rename(trash)
    with suppress(OSError):  # out of sight it is; what stays of it, the next start removes
        sync_folder(folder)
        shutil.rmtree(trash)


def set_aside(folder: Path, later: Sequence[Found]) -> tuple[str, ...]:
    """Rename them, so that `latest` never means a checkpoint of an abandoned line. Returns what was done."""
    notes = []
    for one in later:
        target = _free_name(folder, f"{_ASIDE}{one.path.name}")
        one.path.rename(target)
        notes.append(f"{one.path.name} lies after the step this run begins at; it is now called {target.name}")
    if later:
        sync_folder(folder)
    return tuple(notes)


def _free_name(folder: Path, name: str) -> Path:
    path, number = folder / name, 1
    while path.exists() or path.is_symlink():
        number += 1
        path = folder / f"{name}-{number}"
    return path
