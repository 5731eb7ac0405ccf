"""Which strings name a file below a dataset's root, and which are refused.

A path has one spelling: parts joined by single forward slashes, no `.`, no `..`. That way a path can be a key (of the
staged index, of a cache), and no spelling leads out of the root, on any storage.
"""

from __future__ import annotations

import re

from gracetune.data.errors import OutsideRootError

_DRIVE = re.compile(r"[A-Za-z]:/")
_NO_NAMES = frozenset(["", ".", ".."])


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
    if not _NO_NAMES.isdisjoint(path.split("/")):
        return "it contains an empty part, '.' or '..'"
    if path.isascii():  # nearly all of them; encoding one takes as long as everything before it
        return None
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


def split_suffix(path: str) -> tuple[str, str]:
    """The path without its extension, and the extension as it is written, with its dot.

    As `PurePosixPath` has it, in a tenth of the time: no extension in `name`, `.name` and `name.`.
    """
    dot = path.rfind(".")
    return (path[:dot], path[dot:]) if path.rfind("/") + 1 < dot < len(path) - 1 else (path, "")


def suffix_of(path: str) -> str:
    """The extension in lower case with its dot; empty for `name`, `.name` and `name.`."""
    name = path.rpartition("/")[2]
    stem, dot, extension = name.rpartition(".")
    return f".{extension.lower()}" if stem.strip(".") and dot and extension else ""


def is_hidden(path: str) -> bool:
    """Whether a part of it starts with a dot: macOS' `._photo.jpg`, `.thumbnails/`, `.git/`."""
    return path.startswith(".") or "/." in path
