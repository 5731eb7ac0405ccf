"""The backends of a run: a folder that several datasets share is opened, and staged, once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from gracetune.config.dataset_config import Dataset, InMemory
from gracetune.data.backends.open import OpenedBackend, open_backend
from gracetune.data.backends.progress import OnProgress, unwatched
from gracetune.data.backends.selection import Selection, selection_for
from gracetune.data.backends.share import LocalRanks
from gracetune.hardware import Machine

PoolKey: TypeAlias = tuple[str, str, tuple[InMemory, Selection] | None]


class BackendPool:
    """Opens backends, and closes them all. Every rank opens its datasets in the same order.

    with BackendPool(machine=machine) as pool:
        index = build_index(config, geometry, open_backend=pool.open)
    """

    def __init__(
        self,
        *,
        machine: Machine | None = None,
        ranks: LocalRanks | None = None,
        watch: Callable[[Dataset], OnProgress] = lambda dataset: unwatched,
    ) -> None:
        self._machine, self._ranks, self._watch = machine, ranks, watch
        self._opened: dict[PoolKey, OpenedBackend] = {}

    def open(self, dataset: Dataset) -> OpenedBackend:
        """The dataset's backend; the same for datasets that only differ in what is done with the files."""
        key = pool_key(dataset)
        if key not in self._opened:
            self._opened[key] = open_backend(
                dataset, machine=self._machine, ranks=self._ranks, on_progress=self._watch(dataset)
            )
        return self._opened[key]

    def close(self) -> None:
        while self._opened:
            _, backend = self._opened.popitem()
            backend.close()

    def __enter__(self) -> BackendPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def pool_key(dataset: Dataset) -> PoolKey:
    """Datasets with the same one share a backend."""
    where = dataset.path if "://" in dataset.path else os.path.realpath(Path(dataset.path).expanduser())
    staging = (dataset.in_memory, selection_for(dataset))
    return dataset.type, where, staging if dataset.type == "in_memory" else None
