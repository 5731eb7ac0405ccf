"""Looking at a path someone wrote, without ever raising: too long, no such home, no permission are answers too."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class PathStatus:
    """What a path leads to."""

    kind: Literal["file", "folder", "nothing", "unreachable"]
    path: Path
    why: str = ""
    """Why it cannot be looked at, where it cannot."""

    @property
    def words(self) -> str:
        """For behind the name: `x, which does not exist`."""
        return {
            "file": "which is a file",
            "folder": "which is a folder",
            "nothing": "which does not exist",
            "unreachable": f"which cannot be looked at: {self.why}",
        }[self.kind]


def inspect_path(name: str | Path, *, below: Path | None = None) -> PathStatus:
    """What `name` leads to, `~` included, from the working folder or from `below`."""
    path = Path(name)
    try:
        path = path.expanduser() if below is None else below / path.expanduser()
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return PathStatus("nothing", path)
    except OSError as error:
        return PathStatus("unreachable", path, error.strerror or type(error).__name__)
    except (RuntimeError, ValueError) as error:  # no such user behind a `~`; a NUL byte
        return PathStatus("unreachable", path, str(error).rstrip("."))
    return PathStatus("folder" if stat.S_ISDIR(mode) else "file", path)
