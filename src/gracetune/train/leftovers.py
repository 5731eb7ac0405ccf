"""What a process of this run that was killed left behind: removed, or brought to its end, by the next one.

Called while the run's folder is locked. Removed are files and folders that only gracetune names so (`temporary_name`),
and files that the journal says were never completed. Everything else is somebody else's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from gracetune.cache.cache_folder import SHARDS
from gracetune.cache.folder_layout import cache_folders
from gracetune.checkpoint.journal import Work
from gracetune.checkpoint.store import CheckpointStore
from gracetune.config.run_config import RunConfig
from gracetune.data.index_builder import scan_folder
from gracetune.models.spec import Expert
from gracetune.storage.atomic import sweep, sweep_folders
from gracetune.storage.os_errors import explain
from gracetune.train.output import RunFolder

_ENDED_BY_REMOVAL: Final[tuple[Work, ...]] = ("saving", "retiring")


def remove_leftovers(
    config: RunConfig, folder: RunFolder, store: CheckpointStore, experts: Sequence[Expert]
) -> list[str]:
    """Returns what could not be removed, in words: leftovers are no reason to stop."""
    folders = cache_folders(config)
    for path in (folder.path, folder.samples, folders.base, scan_folder(config), *_inside(folders.lasting())):
        with suppress(OSError):  # it is not there; or the run finds out itself what is wrong with it
            sweep(path)
    try:
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
    if store.unfinished("finishing") and not folder.exist(folder.final_files(experts, config.adapter.kind)):
        notes += folder.remove_step(experts, None)
    return notes


def _inside(stores: Iterable[Path]) -> Iterator[Path]:
    """A finished run opens no store, which would sweep it."""
    for store in stores:
        yield from (store, store / SHARDS)


def _sweep_model(folder: Path, components: Iterable[str]) -> None:
    """A model's folder holds whole components, or is not there."""
    sweep_folders(folder)
    for component in components:
        shutil.rmtree(folder / f".{component}.tmp", ignore_errors=True)  # what earlier releases called it
    if not any(folder.iterdir()):
        folder.rmdir()
