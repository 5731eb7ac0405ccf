"""Remove what a killed process of this run left behind.

This runs while the run's folder is locked. It removes files and folders with gracetune's temporary names
(`temporary_name`), requests that were not read, and the weights that the journal (`checkpoint/folder.py`) records as
incomplete or no longer kept. It touches nothing else.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from gracetune.cache.folders import SHARDS, cache_folders
from gracetune.checkpoint.folder import Work
from gracetune.checkpoint.store import CheckpointStore
from gracetune.config.run_config import RunConfig
from gracetune.data.index_builder import scan_folder
from gracetune.models.spec import Expert
from gracetune.storage.atomic import sweep, sweep_folders
from gracetune.storage.os_errors import explain
from gracetune.train.output import RunFolder
from gracetune.train.run_requests import discard

_ENDED_BY_REMOVAL: Final[tuple[Work, ...]] = ("saving", "retiring")
"""Operations of the journal that end by removing the step's weights: writing new weights, deleting old ones."""


def remove_leftovers(
    config: RunConfig, folder: RunFolder, store: CheckpointStore, experts: Sequence[Expert]
) -> list[str]:
    """Return notes about what could not be removed. Leftovers do not stop a run."""
    folders = cache_folders(config)
    for path in (folder.path, folder.samples, folders.base, scan_folder(config), *_folders_of(folders.lasting())):
        with suppress(OSError):  # it does not exist, or the run will report the problem when it uses the folder
            sweep(path)
    try:
        discard(folder.path)  # a stop that was meant for an earlier process must not end this one
        for model in folder.model_folders():
            _sweep_model(model, [expert.component for expert in experts])
    except OSError as error:
        return [f"what a killed process left could not be removed: {explain(error, folder.path).found}"]
    notes = []
    for work in _ENDED_BY_REMOVAL:
        for step in store.unfinished(work):
            failed = folder.remove_step(experts, step)
            notes += failed
            if not failed:
                store.end_work(work, step)
    if store.unfinished("finishing") and not folder.has_all(folder.final_files(experts, config.adapter.kind)):
        notes += folder.remove_step(experts, None)  # the run writes them again
    return notes


def _folders_of(stores: Iterable[Path]) -> Iterator[Path]:
    """The folders of these caches. Opening a cache sweeps it, but a run that only finishes its files opens none."""
    for store in stores:
        yield from (store, store / SHARDS)


def _sweep_model(folder: Path, components: Iterable[str]) -> None:
    """Remove incomplete components, and the folder if nothing is left in it."""
    sweep_folders(folder)
    for component in components:
        shutil.rmtree(folder / f".{component}.tmp", ignore_errors=True)  # the temporary name in earlier releases
    if not any(folder.iterdir()):
        folder.rmdir()
