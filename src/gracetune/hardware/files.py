"""Reading of `/proc` and `/sys` below a given root, and parsers for small text files. None of this raises."""

from __future__ import annotations

import re
from pathlib import Path

# These kernel files have a few kilobytes. The limit protects against a manipulated recording.
_READ_LIMIT = 1 << 20
_INTEGER = re.compile(r"-?[0-9]{1,19}")


class HostFiles:
    """The files of a machine: this machine (`/`), or a recording's folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str) -> str | None:
        """The text of a file, given its absolute path on that machine; None if it cannot be read."""
        try:
            with self._at(path).open("rb") as file:
                return file.read(_READ_LIMIT).decode(errors="replace")
        except (OSError, ValueError):  # ValueError: a path with a NUL byte, from a manipulated recording
            return None

    def names(self, path: str) -> tuple[str, ...] | None:
        """The sorted names in a folder; None if it does not exist."""
        try:
            return tuple(sorted(entry.name for entry in self._at(path).iterdir()))
        except (OSError, ValueError):
            return None

    def _at(self, path: str) -> Path:
        # Paths contain text from other files, so ".." is removed: it must not lead out of a recording.
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        return self._root.joinpath(*parts)


def parse_integer(text: str | None) -> int | None:
    """An integer without any other text; else None."""
    stripped = (text or "").strip()
    return int(stripped) if _INTEGER.fullmatch(stripped) else None


def parse_fields(text: str) -> dict[str, int]:
    """Parse lines of `name number`, as in memory.stat."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        number = parse_integer(value)
        if name and number is not None:
            found[name] = number
    return found


def parse_colon_lines(text: str) -> dict[str, str]:
    """Parse lines of `name: value`. The first line of each name counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found
