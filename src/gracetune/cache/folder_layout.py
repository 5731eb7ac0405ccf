"""Cache folders. Each store is a subfolder of a folder that the config names:

<cache.cache_dir>/latents      latents that stay valid; in <dataset.cache_dir>/latents if the dataset sets it, else in
                               <cache.vae_cache_dir>/latents if that is set
<cache.cache_dir>/text         text embeddings; in <cache.text_cache_dir>/text if that is set
<any of these>/epochs/<n>      entries that `cache_mode: refresh_each_epoch` makes for epoch n, counted from 0

The folders in a config often contain the caches of another program, and a store rejects a folder with other files.
Subfolders avoid that conflict. Entries of an epoch have stores of their own. A past epoch can then be removed as soon
as no process has its store open, while all processes keep reading the other stores.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gracetune.config.run_config import RunConfig
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
