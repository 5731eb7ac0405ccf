"""Whether a run could stage its datasets, found out without staging anything."""

from __future__ import annotations

from gracetune.config.dataset_config import Dataset
from gracetune.data.backend import Backend
from gracetune.data.backends.estimate import Estimate
from gracetune.data.backends.open import plain_backend, stager_for
from gracetune.data.backends.pool import PoolKey, pool_key
from gracetune.hardware import Machine, probe


class Rehearsal:
    """Opens datasets where they lie, in place of `BackendPool`, and refuses what the run would refuse.

    What one dataset will take of main memory is no longer free for the next.
    """

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine
        self._seen: set[PoolKey] = set()
        self.estimates: dict[str, Estimate] = {}
        """Of what is to be staged, by dataset id; the masks of a dataset have an id of their own."""
        self.notes: list[str] = []

    def open(self, dataset: Dataset) -> Backend:
        key = pool_key(dataset)
        if dataset.type == "in_memory" and key not in self._seen:
            self._seen.add(key)
            self.estimates[dataset.id] = self._estimate(dataset)
        return plain_backend(dataset.path)

    def _estimate(self, dataset: Dataset) -> Estimate:
        self._machine = self._machine or probe()
        taken = sum(estimate.stored for estimate in self.estimates.values())
        estimate, unchecked = stager_for(dataset, self._machine).estimate(spoken_for=taken)
        if unchecked is not None:
            self.notes.append(f"dataset {dataset.id}: {unchecked}")
        return estimate
