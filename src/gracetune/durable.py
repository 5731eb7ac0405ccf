"""What has to happen on the disk before a file can be said to be there."""

from __future__ import annotations

import errno
import os
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
