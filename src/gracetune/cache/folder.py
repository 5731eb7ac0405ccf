"""The folder of a cache: recognised, made, refused. What is not ours is never touched.

gracetune-cache.json   {"format": "gracetune-cache", "version": 1}: the folder is ours
shards/                immutable files of entries (see shards.py)
index.safetensors      an accelerator (see manifest.py)
users.lock             held shared by every open store, exclusively while entries are removed
upkeep.lock            held by the one process that merges or removes shards
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from gracetune.cache.errors import ForeignFolderError, ReadOnlyCacheError, unreadable, unwritable
from gracetune.errors import Problem
from gracetune.storage.atomic import is_temporary, write_file

FORMAT = "gracetune-cache"
VERSION = 1
FORMAT_FILE = "gracetune-cache.json"
INDEX_FILE = "index.safetensors"
SHARDS = "shards"


def prepare(folder: Path) -> None:
    """Make sure the folder is a cache of ours that we may write to; an empty or absent one becomes one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_ours(folder):
            _refuse_others(folder)
            text = json.dumps({"format": FORMAT, "version": VERSION}).encode() + b"\n"
            write_file(folder / FORMAT_FILE, text)
        (folder / SHARDS).mkdir(exist_ok=True)
    except OSError as error:
        raise unwritable(error, folder, needed=0, free=None) from error
    for place in (folder, folder / SHARDS):
        if not os.access(place, os.W_OK | os.X_OK):
            found, expected = "a folder we may read and not write to", "a folder we may write to"
            hint = f"look at `ls -ld {place}` and `findmnt -T {place}`, or set cache.cache_dir to a folder of yours"
            raise ReadOnlyCacheError(Problem("cache", found, expected, hint, str(folder)))


def require(folder: Path) -> None:
    """Make sure the folder is a cache of ours."""
    try:
        if _is_ours(folder):
            return
    except OSError as error:
        raise unreadable(error, folder) from error
    found = "no cache of gracetune" if folder.exists() else "no such folder"
    hint = "gracetune cache build CONFIG, or correct cache.cache_dir"
    raise ForeignFolderError(Problem("cache", found, f"a folder with {FORMAT_FILE}", hint, str(folder)))


def _is_ours(folder: Path) -> bool:
    path = folder / FORMAT_FILE
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        said = json.loads(text)
        version = said["version"] if said["format"] == FORMAT else None
    except (ValueError, TypeError, KeyError):
        version = None
    if isinstance(version, int) and version == VERSION:
        return True
    if isinstance(version, int) and version > VERSION:
        found = f"a cache of format {version}, made by a newer gracetune"
        hint = "update gracetune, or set cache.cache_dir to another folder"
    else:
        found = f"{text[:60]!r}"
        hint = "set cache.cache_dir to another folder"
    raise ForeignFolderError(Problem("format", found, f"a cache of format {VERSION}", hint, str(path)))


def _refuse_others(folder: Path) -> None:
    # A temporary file of ours: another process is making this very folder a cache, or was killed when it did.
    others = sorted(path.name for path in folder.iterdir() if not is_temporary(path.name))
    if not others or (folder / FORMAT_FILE).exists():
        return
    found = f"a folder with other files in it, such as {others[0]!r}"
    hint = f"set cache.cache_dir to a folder of its own, such as {folder / 'gracetune'}; nothing was touched"
    raise ForeignFolderError(Problem("cache", found, "an empty folder, or a cache of ours", hint, str(folder)))
