"""Validation of paths below a dataset's root.

A path has exactly one spelling: parts joined by single forward slashes, without `.` or `..`. A path can therefore be a
key (in the staged index or in a cache), and cannot lead out of the root on any storage.
"""

from __future__ import annotations

import re

from gracetune.data.errors import OutsideRootError

_DRIVE = re.compile(r"[A-Za-z]:/")
_NO_NAMES = frozenset(["", ".", ".."])


def rejection(path: str) -> str | None:
    """Why this is not a valid path below a root; None if it is valid."""
    if not path:
        return "it is empty"
    if "\0" in path:
        return "it contains a NUL byte"
    if "\\" in path:
        return "it contains a backslash; folders must be separated by /"
    if path.startswith("/") or _DRIVE.match(path):
        return "it is an absolute path"
    if not _NO_NAMES.isdisjoint(path.split("/")):
        return "it contains an empty part, '.' or '..'"
    if path.isascii():  # nearly all paths; encoding would take as long as all other checks together
        return None
    try:
        path.encode()
    except UnicodeEncodeError:
        return "its name is not valid UTF-8"
    return None


def checked(path: str, root: str) -> str:
    """The path itself if it is valid. Raises OutsideRootError with the reason otherwise."""
    reason = rejection(path)
    if reason is not None:
        raise OutsideRootError(f"{printable(path)!r} is not a path in {root}: {reason}")
    return path


def printable(path: str) -> str:
    """The path with invalid UTF-8 escaped. Python decodes such bytes to lone surrogates, which cannot be printed."""
    return path.encode(errors="backslashreplace").decode()


def split_suffix(path: str) -> tuple[str, str]:
    """The path without its extension, and the extension as written, with its dot.

    `name`, `.name` and `name.` have no extension. This takes a tenth of the time of `PurePosixPath`.
    """
    dot = path.rfind(".")
    return (path[:dot], path[dot:]) if path.rfind("/") + 1 < dot < len(path) - 1 else (path, "")


def suffix_of(path: str) -> str:
    """The extension in lower case with its dot; empty for `name`, `.name` and `name.`."""
    name = path.rpartition("/")[2]
    stem, dot, extension = name.rpartition(".")
    return f".{extension.lower()}" if stem.strip(".") and dot and extension else ""


def is_hidden(path: str) -> bool:
    """Whether any part of the path starts with a dot: macOS's `._photo.jpg`, `.thumbnails/`, `.git/`."""
    return path.startswith(".") or "/." in path
