"""What has to happen on the disk before a file can be said to be there."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path


def sync_folder(folder: str | Path) -> None:
    """A rename is on disk only when the folder is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Complete or absent: temp, fsync, rename. What was there before stays until the new file is complete."""
    temporary = path.with_name(f".gracetune-{secrets.token_hex(8)}.part")
    # Not tempfile: its files are for their owner alone, and these obey the user's umask.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
