"""Which strings name a file below a dataset's root, and which are refused.

A path has one spelling: parts joined by single forward slashes, no `.`, no `..`. That way a path can be a key (of the
staged index, of a cache), and no spelling leads out of the root, on any storage.
"""

from __future__ import annotations

import re

from gracetune.data.errors import OutsideRootError

_DRIVE = re.compile(r"[A-Za-z]:/")


def refusal(path: str) -> str | None:
    """Why this is no path below a root, or None where it is one."""
    if not path:
        return "it is empty"
    if "\0" in path:
        return "it contains a NUL byte"
    if "\\" in path:
        return "it contains a backslash, and folders are separated by /"
    if path.startswith("/") or _DRIVE.match(path):
        return "it is absolute"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "it contains an empty part, '.' or '..'"
    try:
        path.encode()
    except UnicodeEncodeError:
        return "its name is not valid UTF-8"
    return None


def checked(path: str, root: str) -> str:
    """The path itself, or an error that says what is wrong with it."""
    reason = refusal(path)
    if reason is not None:
        raise OutsideRootError(f"{printable(path)!r} names no file in {root}: {reason}")
    return path


def printable(path: str) -> str:
    """Bytes that are no UTF-8 arrive as lone surrogates, which no terminal and no JSON file takes."""
    return path.encode(errors="backslashreplace").decode()


def suffix_of(path: str) -> str:
    """The extension in lower case with its dot; empty for `name`, `.name` and `name.`."""
    name = path.rpartition("/")[2]
    stem, dot, extension = name.rpartition(".")
    return f".{extension.lower()}" if stem.strip(".") and dot and extension else ""


def is_hidden(path: str) -> bool:
    """Whether a part of it starts with a dot: macOS' `._photo.jpg`, `.thumbnails/`, `.git/`."""
    return any(part.startswith(".") for part in path.split("/"))
