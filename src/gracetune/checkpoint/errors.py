"""What goes wrong with checkpoints. Each message says what was found, what was expected and what to type."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

from gracetune.errors import GracetuneError, Problem
from gracetune.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


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
    why = error.strerror or str(error)
    if isinstance(error.filename, str):
        why += f", writing {Path(error.filename).name}"
    safe = "there is no earlier checkpoint" if last is None else f"{last} is whole"
    key, where = f"checkpoint not written; {safe}", str(folder)
    if error.errno in _FULL:
        return full(key, folder, found=why, needed=needed, free=free)
    if error.errno in _FORBIDDEN:
        hint = f"look at `ls -ld {where}` and `findmnt -T {where}`, or set output_dir to a folder of yours"
        return CheckpointError(Problem(key, f"not writable: {why}", "a folder we may write to", hint, where))
    hint = f"look at the disk (`dmesg`, `df -h {where}`), then start again with --resume latest"
    return CheckpointError(Problem(key, why, "a folder that takes files", hint, where))


def full(key: str, folder: Path, *, found: str, needed: int, free: int | None) -> CheckpointFullError:
    left = "an unknown amount" if free is None else format_bytes(free)
    found = f"{found}; {left} free" if found else f"{left} free"
    hint = (
        f"free space on that disk (`df -h {folder}`), keep fewer (--set checkpoints.keep_last=1) or set output_dir to "
        "another disk; then start again with --resume latest"
    )
    return CheckpointFullError(Problem(key, found, f"room for {format_bytes(needed)}", hint, str(folder)))


def unreadable(error: OSError, path: Path) -> CheckpointError:
    hint = f"look at `ls -ld {path}`"
    why = error.strerror or str(error)
    return CheckpointError(Problem("checkpoint", f"it cannot be read: {why}", "a folder we may read", hint, str(path)))


def listed(names: Iterable[object], none: str = "none") -> str:
    words = [str(name) for name in names]
    more = f" and {len(words) - 8:,} more" if len(words) > 8 else ""
    return (", ".join(words[:8]) + more) or none
