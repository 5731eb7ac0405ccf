"""The folder of a cache: create, recognize or reject it. A folder of another program is never changed.

gracetune-cache.json   {"format": "gracetune-cache", "version": 1}: marks the folder as a cache of gracetune
shards/                immutable files of entries (see shards.py)
index.safetensors      the index, an accelerator (see manifest.py)
users.lock             locked shared by every open store, and exclusively while entries are removed
upkeep.lock            locked by the process that merges or removes shards
work.lock              one locked byte per entry that is being encoded (see claims.py)
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
    """Make sure that the folder is a writable cache of gracetune. An empty or missing folder becomes one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_ours(folder):
            _reject_other_files(folder)
            text = json.dumps({"format": FORMAT, "version": VERSION}).encode() + b"\n"
            write_file(folder / FORMAT_FILE, text)
        (folder / SHARDS).mkdir(exist_ok=True)
    except OSError as error:
        raise unwritable(error, folder, needed=0, free=None) from error
    for path in (folder, folder / SHARDS):
        if not os.access(path, os.W_OK | os.X_OK):
            found, expected = "a folder without write permission", "a writable folder"
            hint = f"check `ls -ld {path}` and `findmnt -T {path}`, or set cache.cache_dir to a folder you own"
            raise ReadOnlyCacheError(Problem("cache", found, expected, hint, str(folder)))


def require(folder: Path) -> None:
    """Make sure that the folder is a cache of gracetune."""
    try:
        if _is_ours(folder):
            return
    except OSError as error:
        raise unreadable(error, folder) from error
    found = "a folder that is not a gracetune cache" if folder.exists() else "no such folder"
    hint = "gracetune cache build CONFIG, or correct cache.cache_dir"
    raise ForeignFolderError(Problem("cache", found, f"a folder with {FORMAT_FILE}", hint, str(folder)))


def _is_ours(folder: Path) -> bool:
    path = folder / FORMAT_FILE
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        content = json.loads(text)
        version = content["version"] if content["format"] == FORMAT else None
    except (ValueError, TypeError, KeyError):
        version = None
    if isinstance(version, int) and version == VERSION:
        return True
    if isinstance(version, int) and version > VERSION:
        found = f"cache format {version}, written by a newer gracetune"
        hint = "update gracetune, or set cache.cache_dir to another folder"
    else:
        found = f"{text[:60]!r}"
        hint = "set cache.cache_dir to another folder"
    raise ForeignFolderError(Problem("format", found, f"cache format {VERSION}", hint, str(path)))


def _reject_other_files(folder: Path) -> None:
    # Our own temporary files are fine: another process is creating this cache, or was killed while doing so.
    others = sorted(path.name for path in folder.iterdir() if not is_temporary(path.name))
    if not others or (folder / FORMAT_FILE).exists():
        return
    found = f"a folder that contains other files, such as {others[0]!r}"
    hint = f"set cache.cache_dir to a separate folder, such as {folder / 'gracetune'}; nothing was changed"
    raise ForeignFolderError(Problem("cache", found, "an empty folder or a gracetune cache", hint, str(folder)))
