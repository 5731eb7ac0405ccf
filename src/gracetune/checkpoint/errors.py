"""What goes wrong with checkpoints. Each message says what was found, what was expected and what to type."""

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
    """No room on the disk. Checkpoints made earlier are whole; nothing half was left behind."""


class DamagedCheckpointError(CheckpointError):
    """A complete checkpoint is no longer as it was written."""


class OtherRunError(CheckpointError):
    """A checkpoint belongs to another run than this one."""


class BusyFolderError(CheckpointError):
    """Another process writes checkpoints into the folder."""


class ResumeError(CheckpointError):
    """What `resume` names is no checkpoint."""


class MissingPieceError(CheckpointError):
    """The checkpoint lacks state this run needs."""


def unwritable(error: OSError, folder: Path, *, needed: int, free: int | None, last: Path | None) -> CheckpointError:
    """The error of ours for one that writing gave. `last` is the newest whole checkpoint."""
    safe = "there is no earlier checkpoint" if last is None else f"{last} is whole"
    key, cause = f"checkpoint not written; {safe}", explain(error, folder)
    if cause.kind == "full":
        return full(key, folder, found=cause.found, needed=needed, free=free, remedy=cause.remedy)
    return CheckpointError(problem_of(error, key, folder, elsewhere=_ELSEWHERE, then=_AGAIN))


def full(
    key: str, folder: Path, *, found: str, needed: int, free: int | None, remedy: str | None = None
) -> CheckpointFullError:
    left = "an unknown amount" if free is None else format_bytes(free)
    found = f"{found}; {left} free" if found else f"{left} free"
    remedy = remedy or f"free space on that disk (`df -h {folder}`)"
    hint = f"{remedy}, keep fewer (--set checkpoints.keep_last=1) or {_ELSEWHERE}; {_AGAIN}"
    expected = f"room for {format_bytes(needed)}" if needed else "room for a few small files"
    return CheckpointFullError(Problem(key, found, expected, hint, str(folder)))


def unreadable(error: OSError, path: Path) -> CheckpointError:
    return CheckpointError(problem_of(error, "checkpoint", path, access="read", then=_AGAIN))


def listed(names: Iterable[object], none: str = "none") -> str:
    words = [str(name) for name in names]
    more = f" and {len(words) - 8:,} more" if len(words) > 8 else ""
    return (", ".join(words[:8]) + more) or none
