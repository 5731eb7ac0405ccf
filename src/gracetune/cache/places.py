"""Which folder holds what. Below each folder a config names, the stores have folders of their own:

<cache.cache_dir>/latents      latents that stay right for good; <dataset.cache_dir>/latents where a dataset has one,
                               else <cache.vae_cache_dir>/latents where one is named
<cache.cache_dir>/text         embeddings; <cache.text_cache_dir>/text where one is named
<any of these>/epochs/<n>      what `cache_mode: refresh_each_epoch` draws anew for epoch n, counted from 0

A store refuses a folder with other files in it, and the folders people name often hold another program's caches: so
nothing is put into them directly, and nothing of theirs is in the way. Entries of an epoch lie apart, so that they can
be collected when nobody has their store open any more, while everybody goes on reading the rest.
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
class Places:
    """Where the caches of a run are."""

    base: Path
    text_base: Path
    own: Mapping[str, Path]
    """By dataset id, of those whose latents are not in `base`."""

    def latents(self, dataset: str, epoch: int | None = None) -> Path:
        """`epoch` is given for what is drawn anew in each."""
        return _inside(self.own.get(dataset, self.base), "latents", epoch)

    def text(self, epoch: int | None = None) -> Path:
        return _inside(self.text_base, "text", epoch)

    def epoch_folders(self) -> list[Path]:
        """What holds the stores of epochs, whether it is there or not."""
        return [base / "epochs" for base in sorted({self.base, self.text_base, *self.own.values()})]

    def lasting(self) -> list[Path]:
        """Every store that is not an epoch's, whether it is there or not."""
        return sorted({self.text(), self.base / "latents", *(base / "latents" for base in self.own.values())})

    def epochs(self) -> Iterator[tuple[int, Path]]:
        """Every epoch some entries were made for, with the store that holds them."""
        for folder in self.epoch_folders():
            with explained("cache", folder, access="read", elsewhere="set cache.cache_dir to another folder"):
                inside = sorted(folder.iterdir()) if folder.is_dir() else []
                epochs = [path for path in inside if _NUMBER.fullmatch(path.name) and path.is_dir()]
            for path in epochs:
                yield int(path.name), path


def places_of(config: RunConfig) -> Places:
    cache = config.cache
    base = _folder(cache.cache_dir) if cache.cache_dir else _folder(config.output_dir) / "cache"
    return Places(
        base,
        _folder(cache.text_cache_dir) if cache.text_cache_dir else base,
        {
            dataset.id: _folder(named)
            for dataset in config.datasets
            if (named := dataset.cache_dir or cache.vae_cache_dir) is not None
        },
    )


def _folder(name: str) -> Path:
    # Not Path.expanduser: that raises a RuntimeError where there is no such user.
    return Path(os.path.expanduser(name)).absolute()  # noqa: PTH111


def _inside(base: Path, kind: str, epoch: int | None) -> Path:
    return base / kind if epoch is None else base / "epochs" / str(epoch)
