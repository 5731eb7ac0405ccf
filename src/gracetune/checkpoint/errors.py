"""Errors of checkpoints. Each message says what was found, what was expected and what to type."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gracetune.errors import GracetuneError, Problem
from gracetune.storage.os_errors import explain, problem_of
from gracetune.units import format_bytes

_ELSEWHERE = "set output_dir to another disk"
_AGAIN = "then start again with --resume latest"


class CheckpointError(GracetuneError):
    """A checkpoint cannot be written, read or used."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class CheckpointFullError(CheckpointError):
    """The disk is full. Earlier checkpoints are complete, and no partial one was left behind."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint was complete once, but its content has changed since."""


class OtherRunError(CheckpointError):
    """The checkpoint belongs to another run."""


class BusyFolderError(CheckpointError):
    """Another process writes checkpoints to the folder."""


class ResumeError(CheckpointError):
    """The value of `resume` does not name a checkpoint."""


class MissingStateError(CheckpointError):
    """The checkpoint lacks state that this run needs."""


def write_error(error: OSError, folder: Path, *, needed: int, free: int | None, last: Path | None) -> CheckpointError:
    """The checkpoint error for an OSError of a write. `needed` and `free` are bytes. A `needed` of 0 means a few
    small files, and a `free` of None means unknown. `last` is the newest complete checkpoint."""
    earlier = "there is no earlier checkpoint" if last is None else f"{last} is complete"
    key, cause = f"checkpoint not written; {earlier}", explain(error, folder)
    if cause.kind == "full":
        return disk_full_error(key, folder, found=cause.found, needed=needed, free=free, remedy=cause.remedy)
    return CheckpointError(problem_of(error, key, folder, elsewhere=_ELSEWHERE, then=_AGAIN))


def disk_full_error(
    key: str, folder: Path, *, found: str, needed: int, free: int | None, remedy: str | None = None
) -> CheckpointFullError:
    """The error for a full disk."""
    left = "an unknown amount" if free is None else format_bytes(free)
    found = f"{found}; {left} free" if found else f"{left} free"
    remedy = remedy or f"free space on that disk (`df -h {folder}`)"
    hint = f"{remedy}, keep fewer (--set checkpoints.keep_last=1) or {_ELSEWHERE}; {_AGAIN}"
    expected = f"{format_bytes(needed)} free" if needed else "room for a few small files"
    return CheckpointFullError(Problem(key, found, expected, hint, str(folder)))


def read_error(error: OSError, path: Path) -> CheckpointError:
    """The checkpoint error for an OSError of a read."""
    return CheckpointError(problem_of(error, "checkpoint", path, access="read", then=_AGAIN))


def list_names(names: Iterable[object], none: str = "none") -> str:
    """The first eight names, and how many more there are; `none` if there are no names."""
    words = [str(name) for name in names]
    more = f" and {len(words) - 8:,} more" if len(words) > 8 else ""
    return (", ".join(words[:8]) + more) or none
