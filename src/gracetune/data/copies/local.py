"""The local copies of a run: plans and makes them, and replaces the addresses in the config by their folders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gracetune.config.dataset_config import Dataset, LocalCopy
from gracetune.config.run_config import RunConfig
from gracetune.data.copies.download import FinishedCopy, make_copy
from gracetune.data.copies.errors import CopyError
from gracetune.data.copies.folder import CopyFolder, CopyManifest
from gracetune.data.copies.plan import CopyPlan, plan_copy
from gracetune.hub.access import HubAccess
from gracetune.storage.transfer import OnFetched, RetryPolicy, is_local_disk_error
from gracetune.units import format_bytes, format_duration

Report = Callable[[str], None]


class Copies:
    """All copies of a run. Datasets that differ only in how the files are used share one."""

    def __init__(self, config: RunConfig, hub: HubAccess) -> None:
        self._config, self._hub = config, hub
        caches = config.cache.cache_dir or str(Path(config.output_dir) / "cache")
        self._folder = Path(caches).expanduser() / "downloads"

    def wanted(self) -> Iterator[tuple[Dataset, LocalCopy, CopyFolder]]:
        """Every copy the run needs, with the first dataset that uses it."""
        seen: set[Path] = set()
        for dataset in self._config.datasets:
            if dataset.disabled or not dataset.has_local_copy:
                continue
            options, folder = self._options_and_folder(dataset)
            if folder.root not in seen:
                seen.add(folder.root)
                yield dataset, options, folder

    def complete(self) -> Iterator[tuple[Dataset, CopyManifest]]:
        """The datasets whose copy is complete."""
        for dataset in self._config.datasets:
            if not dataset.disabled and dataset.has_local_copy:
                _, folder = self._options_and_folder(dataset)
                manifest = folder.manifest() if folder.is_complete() else None
                if manifest is not None:
                    yield dataset, manifest

    def plans(self) -> list[CopyPlan]:
        """The plans of incomplete copies. This lists the sources and downloads nothing."""
        found = [self._plan(dataset, options, folder) for dataset, options, folder in self.wanted()]
        return [plan for plan in found if plan is not None]

    def check(self, plans: list[CopyPlan], memory_free: int | None = None) -> None:
        """Raise CopyError if the copies do not fit. Copies on the same disk share its free space, and all that are
        staged share `memory_free`."""
        taken: dict[int, int] = {}
        staged = 0
        for plan in plans:
            device = _device(plan.folder.root)
            used_by_others = taken.get(device, 0)
            plan.check(memory_free, used_by_others=used_by_others, staged_by_others=staged)
            staged += plan.staged
            taken[device] = used_by_others + plan.disk_needed

    def make(
        self,
        *,
        report: Report = lambda text: None,
        warn: Report = lambda text: None,
        on_fetched: Callable[[str], OnFetched] = lambda name: lambda done, total: None,
        retry_policy: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        announced: bool = False,
    ) -> None:
        """Make all missing copies. If several processes need a copy, one makes it and the others wait.

        `on_fetched` returns the progress callback for a dataset id. Pass `announced=True` if the plans have been shown
        already.
        """
        for dataset, options, folder in self.wanted():
            if self._needs_listing(dataset, folder):
                announce: Report = _nothing if announced else report
                self._make(dataset, options, folder, report, warn, on_fetched(dataset.id), retry_policy, announce)
            else:
                manifest = folder.manifest()
                if manifest is not None:
                    at = f" at {manifest.revision[:12]}" if manifest.revision else ""
                    report(f"dataset {dataset.id}: the copy of {manifest.source}{at} in {folder.root}")

    def localized(self) -> RunConfig:
        """The config with addresses replaced by folders. Raises CopyError if a copy is missing or incomplete."""
        datasets = []
        for dataset in self._config.datasets:
            if dataset.disabled or not dataset.has_local_copy:
                datasets.append(dataset)
                continue
            _, folder = self._options_and_folder(dataset)
            if not folder.is_complete():
                found = f"no complete copy of {dataset.path} in {folder.root}"
                hint = "gracetune data show CONFIG --download, or start the run: both download it"
                raise CopyError.of(dataset.id, found=found, expected="data on this machine", hint=hint)
            datasets.append(dataset.model_copy(update={"path": str(folder.data), "local_copy": None, "storage": None}))
        return self._config.model_copy(update={"datasets": tuple(datasets)})

    def _options_and_folder(self, dataset: Dataset) -> tuple[LocalCopy, CopyFolder]:
        options = dataset.local_copy or LocalCopy()
        parent = self._folder if options.folder is None else Path(options.folder).expanduser()
        return options, CopyFolder.of(dataset, options, parent)

    def _needs_listing(self, dataset: Dataset, folder: CopyFolder) -> bool:
        """Whether the source has to be listed. A complete copy of remote data is used as it is; a local folder may have
        changed."""
        return "://" not in dataset.path or not folder.is_complete()

    def _plan(self, dataset: Dataset, options: LocalCopy, folder: CopyFolder) -> CopyPlan | None:
        """The plan of a copy; None if nothing is missing in it."""
        if not self._needs_listing(dataset, folder):
            return None
        plan = plan_copy(dataset, options, folder, self._hub)
        return plan if plan.missing or not folder.is_complete() else None

    def _make(
        self, dataset: Dataset, options: LocalCopy, folder: CopyFolder, report: Report, warn: Report,
        on_fetched: OnFetched,
        retry_policy: RetryPolicy, announce: Report,
    ) -> None:  # fmt: skip
        with _explained(dataset, folder), folder.locked(report):
            plan = self._plan(dataset, options, folder)  # again, under the lock: another process may have made the copy
            if plan is None:
                return
            plan.check()
            for line in plan.lines():
                announce(line)
            began = time.monotonic()
            made: FinishedCopy = make_copy(plan, on_fetched=on_fetched, retry_policy=retry_policy)
        took = time.monotonic() - began
        size = f"{made.manifest.files} files, {format_bytes(made.manifest.bytes)}"
        report(f"dataset {dataset.id}: {size} in {folder.root}, in {format_duration(took)}")
        for note in made.notes:
            warn(note)


@contextmanager
def _explained(dataset: Dataset, folder: CopyFolder) -> Iterator[None]:
    """Turn errors of this machine's disk into CopyError."""
    try:
        yield
    except OSError as error:
        if not is_local_disk_error(error):
            raise
        raise CopyError.of_disk(dataset.id, folder.root, error) from error


def _nothing(text: str) -> None:
    """Discard a message."""


def _device(folder: Path) -> int:
    """The device number of the disk that the folder is on or will be on."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    return existing.stat().st_dev
