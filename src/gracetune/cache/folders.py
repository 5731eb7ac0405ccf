"""Cache folders: where the stores of a run are, and how a store's folder is created, recognized or rejected.

Each store is a subfolder of a folder that the config names:

<cache.cache_dir>/latents      latents that stay valid; in <dataset.cache_dir>/latents if the dataset sets it, else in
                               <cache.vae_cache_dir>/latents if that is set
<cache.cache_dir>/text         text embeddings; in <cache.text_cache_dir>/text if that is set
<any of these>/epochs/<n>      entries that `cache_mode: refresh_each_epoch` makes for epoch n, counted from 0

The folders in a config often contain the caches of another program, and a store rejects a folder with other files.
Subfolders avoid that conflict. Entries of an epoch have stores of their own. A past epoch can then be removed as soon
as no process has its store open, while all processes keep reading the other stores.

A store's folder contains:

gracetune-cache.json   {"format": "gracetune-cache", "version": 1}: marks the folder as a cache of gracetune
shards/                immutable files of entries (see shards.py)
index.safetensors      the index, an accelerator (see manifest.py)
users.lock             locked shared by every open store, and exclusively while entries are removed
upkeep.lock            locked by the process that merges or removes shards
work.lock              one locked byte per entry that is being encoded (see pass_worker.py)

A folder of another program is never changed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gracetune.cache.errors import ForeignFolderError, ReadOnlyCacheError, unreadable, unwritable
from gracetune.config.run_config import RunConfig
from gracetune.errors import Problem
from gracetune.storage.atomic import is_temporary, write_file
from gracetune.storage.os_errors import explained

_NUMBER = re.compile(r"0|[1-9][0-9]*")


@dataclass(frozen=True)
class CacheFolders:
    """The cache folders of a run."""

    base: Path
    text_base: Path
    own: Mapping[str, Path]
    """Folders by dataset id, for datasets whose latents are not in `base`."""

    def latents(self, dataset: str, epoch: int | None = None) -> Path:
        """The latent store of a dataset. Pass `epoch` for entries that are refreshed each epoch."""
        return _inside(self.own.get(dataset, self.base), "latents", epoch)

    def text(self, epoch: int | None = None) -> Path:
        return _inside(self.text_base, "text", epoch)

    def epoch_folders(self) -> list[Path]:
        """The parent folders of all epoch stores. They may not exist."""
        return [base / "epochs" for base in sorted({self.base, self.text_base, *self.own.values()})]

    def lasting(self) -> list[Path]:
        """All stores except those of epochs. They may not exist."""
        return sorted({self.text(), self.base / "latents", *(base / "latents" for base in self.own.values())})

    def epochs(self) -> Iterator[tuple[int, Path]]:
        """All existing epoch stores, as pairs of epoch and folder."""
        for folder in self.epoch_folders():
            with explained("cache", folder, access="read", elsewhere="set cache.cache_dir to another folder"):
                inside = sorted(folder.iterdir()) if folder.is_dir() else []
                epochs = [path for path in inside if _NUMBER.fullmatch(path.name) and path.is_dir()]
            for path in epochs:
                yield int(path.name), path


def cache_folders(config: RunConfig) -> CacheFolders:
    cache = config.cache
    base = _folder(cache.cache_dir) if cache.cache_dir else _folder(config.output_dir) / "cache"
    return CacheFolders(
        base,
        _folder(cache.text_cache_dir) if cache.text_cache_dir else base,
        {
            dataset.id: _folder(folder)
            for dataset in config.datasets
            if (folder := dataset.cache_dir or cache.vae_cache_dir) is not None
        },
    )


def _folder(name: str) -> Path:
    # Path.expanduser raises a RuntimeError for an unknown user; os.path.expanduser leaves such a name unchanged.
    return Path(os.path.expanduser(name)).absolute()  # noqa: PTH111


def _inside(base: Path, kind: str, epoch: int | None) -> Path:
    return base / kind if epoch is None else base / "epochs" / str(epoch)


# -- the folder of one store -------------------------------------------------------------------------------------------


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
