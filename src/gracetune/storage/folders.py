"""Folders that are not for everybody: who may look into a folder that we make.

A new run folder is for its owner. Its group gets in where files are shared with it on purpose: the umask lets a group
write (002, 007), or the folder above passes its group on (setgid, as the folders of a project have it). Other users
never get in. A folder that is there already keeps its mode: whoever wants another one makes the folder, or changes it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OWNER, _GROUP = 0o700, 0o070
_GROUP_WRITES = 0o020


def make_private_folder(folder: Path) -> None:
    """The folder and those above it; or the access to one that was made a moment ago, restricted."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    mode = private_mode(folder.parent)
    try:
        folder.mkdir(mode)
    except FileExistsError:
        now = stat.S_IMODE(folder.stat().st_mode)
        folder.chmod(now & (mode | 0o7000))


@contextmanager
def private_if_new(folder: Path) -> Iterator[None]:
    """A folder that something inside makes is restricted afterwards."""
    was_there = folder.exists()
    try:
        yield
    finally:
        if not was_there and folder.is_dir():
            make_private_folder(folder)


def private_mode(parent: Path) -> int:
    """For a new folder in this one; the umask still takes its part."""
    shares = not _umask() & _GROUP_WRITES or bool(parent.stat().st_mode & stat.S_ISGID)
    return _OWNER | _GROUP if shares else _OWNER


def _umask() -> int:
    """Asked of the kernel: `os.umask` can only set it, for all threads of the process."""
    try:
        found = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found[1], 8)
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
