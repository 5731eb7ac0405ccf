"""The contents of a checkpoint folder, and the retention rules. Foreign files are never changed.

checkpoint-<step>/           complete checkpoints (see `manifest`)
set-aside-checkpoint-<step>/ checkpoints after the step that a run resumed from; never read, never deleted
.gracetune-<32 hex>.tmp/     being written or deleted; if a process was killed, the next run removes it
.gracetune.lock              locked by the process that writes; its first line is the journal (see `Journal`)
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from gracetune.checkpoint.errors import BusyFolderError, list_names, read_error
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
        raise read_error(error, folder) from error
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
    """The steps whose checkpoints are not kept: all but the last `keep_last` and multiples of `keep_every`. Pure."""
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

    `protected` steps are kept in any case. Deleted steps stay in the journal as `retiring` until their weights are
    deleted too.
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
                notes.append(f"{path} is not deleted, because it contains other files: {list_names(sorted(foreign))}")
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


# -- the journal -------------------------------------------------------------------------------------------------------


Work = Literal["saving", "retiring", "sampling", "finishing"]
_LONGEST = 1 << 16
"""Bytes of the lock file that are read."""


class Journal:
    """The operations that the process holding the lock has started but not finished. Thread-safe.

    The journal is the first line of the lock file, in JSON: {"saving": [30], "retiring": [10]}. The next process that
    takes the lock completes or reverts these operations:

    saving N     The weights of step N are written before checkpoint N is complete. If the checkpoint is missing,
                 the weights are removed.
    retiring N   Checkpoint N is no longer kept. It is removed together with the weights of step N.
    sampling N   Not all validation samples of step N exist. A run that resumes from step N generates them.
    finishing N  The final files, checks and report after the last step N are incomplete.

    The line is written with one system call and not synced, which suffices for processes that are killed. A power
    failure may lose it; then files that belong to no checkpoint are left behind.
    """

    def __init__(self, lock_file: int, *, is_fresh: bool) -> None:
        """`lock_file` is an open descriptor; the caller closes it.

        Pass `is_fresh` on a file system without locks. An existing line may then belong to a process that is still
        running, so it is not read.
        """
        self._descriptor = lock_file
        self._mutex = threading.Lock()
        self._steps = _parse(b"" if is_fresh else os.pread(lock_file, _LONGEST, 0))

    def steps(self, work: Work) -> tuple[int, ...]:
        with self._mutex:
            return tuple(sorted(self._steps[work]))

    def begin(self, work: Work, step: int) -> None:
        with self._mutex:
            self._steps[work].add(step)
            self._write()

    def end(self, work: Work, *steps: int) -> None:
        with self._mutex:
            if not self._steps[work].isdisjoint(steps):
                self._steps[work].difference_update(steps)
                self._write()

    def _write(self) -> None:
        found = {work: sorted(steps) for work, steps in self._steps.items() if steps}
        line = f"{json.dumps(found)}\n".encode() if found else b"\n"
        with suppress(OSError):  # e.g. a full disk; the only consequence is that some files may be left behind
            os.pwrite(self._descriptor, line, 0)
            os.ftruncate(self._descriptor, len(line))


def read_journal(lock_file: Path) -> Mapping[Work, set[int]]:
    """Read a journal without taking the lock. If its process is running, the result may be outdated."""
    try:
        with lock_file.open("rb") as file:
            return _parse(file.read(_LONGEST))
    except OSError:  # the file does not exist; other problems are reported when the lock is taken
        return _parse(b"")


def _parse(text: bytes) -> dict[Work, set[int]]:
    """Parse the first line. An incomplete line counts as empty."""
    try:
        found = json.loads(text.partition(b"\n")[0] or b"{}")
    except ValueError:
        found = {}
    return {work: _whole_numbers(found, work) for work in get_args(Work)}


def _whole_numbers(found: object, work: Work) -> set[int]:
    steps = found.get(work) if isinstance(found, dict) else None
    return {step for step in steps if type(step) is int} if isinstance(steps, Iterable) else set()
