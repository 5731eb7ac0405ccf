"""Reading `/proc` and `/sys` below any root, and taking small text files apart without ever raising."""

from __future__ import annotations

import re
from pathlib import Path

# A kernel file of this kind is a few kilobytes; a recording that says otherwise is not worth the memory.
_READ_LIMIT = 1 << 20
_INTEGER = re.compile(r"-?[0-9]{1,19}")


class HostFiles:
    """The files of one machine: this one (`/`), or a recording's folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str) -> str | None:
        """The text at an absolute path of that machine, or None where it cannot be read."""
        try:
            with self._at(path).open("rb") as file:
                return file.read(_READ_LIMIT).decode(errors="replace")
        except (OSError, ValueError):  # ValueError: a path with a NUL byte, from a file that lies
            return None

    def names(self, path: str) -> tuple[str, ...] | None:
        """The sorted names in a folder, or None where there is no such folder."""
        try:
            return tuple(sorted(entry.name for entry in self._at(path).iterdir()))
        except (OSError, ValueError):
            return None

    def _at(self, path: str) -> Path:
        # Paths are built from what other files say; ".." must not lead out of a recording.
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        return self._root.joinpath(*parts)


def parse_integer(text: str | None) -> int | None:
    """One whole number and nothing else."""
    stripped = (text or "").strip()
    return int(stripped) if _INTEGER.fullmatch(stripped) else None


def parse_fields(text: str) -> dict[str, int]:
    """Lines of `name number`, as in memory.stat."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        number = parse_integer(value)
        if name and number is not None:
            found[name] = number
    return found


def parse_colon_lines(text: str) -> dict[str, str]:
    """Lines of `name: value`; the first of a name counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found
