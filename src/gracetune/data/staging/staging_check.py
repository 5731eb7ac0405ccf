"""Checking whether a run could stage its datasets, without staging them."""

from __future__ import annotations

from collections.abc import Iterable

from gracetune.config.dataset_config import Dataset
from gracetune.data.backend import Backend
from gracetune.data.backends.open import open_unstaged
from gracetune.data.backends.pool import SharedFolder, find_folder, shared_folders, sharing_notes
from gracetune.data.staging.memory import Estimate
from gracetune.data.staging.stager import stager_for
from gracetune.hardware import Machine, probe


class StagingCheck:
    """Replaces `BackendPool` for a dry run: opens datasets without staging and raises the errors that a run would.

    Memory that one dataset will need counts as used for the next.
    """

    def __init__(self, datasets: Iterable[Dataset] = (), machine: Machine | None = None) -> None:
        self._machine = machine
        self._folders = [*shared_folders(datasets)]
        self.estimates: dict[str, Estimate] = {}
        """The estimate of each folder to be staged, by the id of its first dataset. Mask folders have their own ids."""
        self.notes = [*sharing_notes(self._folders)]

    def open(self, dataset: Dataset) -> Backend:
        folder = find_folder(self._folders, dataset)
        if dataset.type == "in_memory" and folder.dataset.id not in self.estimates:
            self.estimates[folder.dataset.id] = self._estimate(folder)
        return open_unstaged(dataset)

    def _estimate(self, folder: SharedFolder) -> Estimate:
        self._machine = self._machine or probe()
        taken = sum(estimate.stored for estimate in self.estimates.values())
        stager = stager_for(folder.dataset, self._machine, selection=folder.selection)
        estimate, unchecked = stager.estimate(spoken_for=taken)
        if unchecked is not None:
            self.notes.append(f"dataset {folder.dataset.id}: {unchecked}")
        return estimate
