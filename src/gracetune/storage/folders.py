"""Permissions of the folders we create.

A new run folder is readable by its owner only. Its group gets access where the machine is set up for sharing: the umask
lets the group write (002, 007), or the parent folder is setgid, as project folders are. Other users never get access.
An existing folder keeps its mode, so users who want another mode create the folder themselves or change it.
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
    """Create the folder and its parents, or make an existing folder private.

    An existing one must be gracetune's own or just created: it loses the permissions that a private one must not have.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    mode = private_mode(folder.parent)
    try:
        folder.mkdir(mode)
    except FileExistsError:
        now = stat.S_IMODE(folder.stat().st_mode)
        folder.chmod(now & (mode | 0o7000))


@contextmanager
def private_if_new(folder: Path) -> Iterator[None]:
    """Make the folder private afterwards if code inside the `with` block created it."""
    existed = folder.exists()
    try:
        yield
    finally:
        if not existed and folder.is_dir():
            make_private_folder(folder)


def private_mode(parent: Path) -> int:
    """The mode for a new private folder inside `parent`. The umask is applied on top by the kernel."""
    shares = not _umask() & _GROUP_WRITES or bool(parent.stat().st_mode & stat.S_ISGID)
    return _OWNER | _GROUP if shares else _OWNER


def _umask() -> int:
    """The process's umask, read from /proc: `os.umask` can only read it by setting it, which affects all threads."""
    try:
        found = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found[1], 8)
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
