"""Inspects a path that a user wrote. It never raises: a path that cannot be inspected is a result too."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class PathStatus:
    """The kind of thing at a path."""

    kind: Literal["file", "folder", "nothing", "unreachable"]
    path: Path
    why: str = ""
    """Why the path cannot be inspected; empty for the other kinds."""

    @property
    def words(self) -> str:
        """A relative clause that follows the path in a message: `x, which does not exist`."""
        return {
            "file": "which is a file",
            "folder": "which is a folder",
            "nothing": "which does not exist",
            "unreachable": f"which cannot be read: {self.why}",
        }[self.kind]


def inspect_path(name: str | Path, *, below: Path | None = None) -> PathStatus:
    """Inspect `name`, relative to `below` or to the working folder. A leading `~` is the home folder."""
    path = Path(name)
    try:
        path = path.expanduser() if below is None else below / path.expanduser()
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return PathStatus("nothing", path)
    except OSError as error:
        return PathStatus("unreachable", path, error.strerror or type(error).__name__)
    except (RuntimeError, ValueError) as error:  # `~` followed by an unknown user; a NUL byte
        return PathStatus("unreachable", path, str(error).rstrip("."))
    return PathStatus("folder" if stat.S_ISDIR(mode) else "file", path)
