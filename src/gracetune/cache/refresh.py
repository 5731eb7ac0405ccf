"""`cache_mode: refresh_each_epoch`: encode the next epoch's entries in the background while this epoch trains.

    refresher = Refresher(config, index, encoders, folders, epoch=0)    # the entries of epoch 0 exist
    refresher.prepare_next()                                            # starts a thread with its own encoders
    ...                                                                 # epoch 0 is trained
    swap = refresher.swap()                                             # waits if necessary; epoch 1 is now current
    source.use(latents=...)                                             # open stores of epoch 1, close those of epoch 0
    refresher.collect()                                                 # remove the entries of epoch 0
    refresher.prepare_next()

The entries of the `current` epoch are always complete: `swap` waits for all of them. Each epoch has its own stores (see
folders.py). They are removed when no process has them open. With several ranks, the last one to leave an epoch removes
its stores; stores in use are left for the next call. A killed run loses nothing: the next start finds the entries made
for this epoch and the next, and removes older ones.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.cache.created_entries import CreatedEntries
from gracetune.cache.encode_passes import PassOptions
from gracetune.cache.encoder import Encoders
from gracetune.cache.errors import CacheBusyError
from gracetune.cache.folders import CacheFolders
from gracetune.cache.keys import Key
from gracetune.cache.maintenance import EntryRemoval, remove, remove_if_empty, sweep_removed
from gracetune.cache.required_entries import LatentItem, TextItem, is_refreshed
from gracetune.cache.session import Caches, FilledCaches, build, is_cache, needs, open_store
from gracetune.config.run_config import RunConfig
from gracetune.data.index import DataIndex, Unreadable

if TYPE_CHECKING:
    import torch

_Make = Callable[[int], FilledCaches]

NICENESS = 10
"""Priority of the encoding thread and the threads it starts (decoders, torch), so that training steps come first."""


@dataclass(frozen=True)
class Swap:
    """The result of changing to the next epoch."""

    epoch: int
    """The new current epoch."""
    built: FilledCaches
    """`built.index` lacks files that turned out to be damaged. The loader must exclude them too."""
    waited: float
    """Seconds that the caller waited because encoding took longer than the epoch."""


@dataclass(frozen=True)
class Collected:
    """The entries of past epochs that were removed."""

    entries: int
    size: int
    """In bytes."""
    in_use: tuple[Path, ...]
    """Stores of past epochs that a process still has open. They were not removed."""


class Refresher:
    """Prepares the epochs of a run. Use it if `required_entries.is_refreshed(index)`."""

    def __init__(
        self,
        config: RunConfig,
        index: DataIndex,
        encoders: Encoders,
        folders: CacheFolders,
        *,
        epoch: int = 0,
        device: torch.device | None = None,
        options: PassOptions | None = None,
        made: CreatedEntries | None = None,
    ) -> None:
        """`epoch` is the current one, whose entries exist. On a CUDA `device`, encoding uses a separate stream."""
        if not is_refreshed(index):
            raise ValueError("no dataset of this run has cache_mode: refresh_each_epoch")
        self.current = epoch
        self._config, self._index, self._encoders, self._folders = config, index, encoders, folders
        self._device = device
        self._before_writing = None if made is None else made.note
        self._stop = threading.Event()
        # A switch to tiling would store the entries under another id, which this run does not look up.
        self._options = replace(options or PassOptions(), stop=self._stop, may_tile=False)
        self._created: dict[Path, set[Key]] = {}
        self._job: _Job | None = None

    def prepare_next(self) -> None:
        """Start encoding the epoch after the current one, unless that has already started."""
        if self._job is None:
            self._job = _Job(self._make, self.current + 1)

    def swap(self) -> Swap:
        """Wait for the next epoch's entries and make that epoch current. Errors of the encoding are raised here."""
        self.prepare_next()
        assert self._job is not None, "prepare_next has created it"
        began = time.monotonic()
        job, self._job = self._job, None
        built = job.result()
        self._index = built.index
        self.current = job.epoch
        return Swap(job.epoch, built, time.monotonic() - began)

    def leave_out(self, unreadable: Unreadable) -> None:
        """Exclude files that other processes found to be damaged, starting with the next preparation."""
        self._index = self._index.without(unreadable)

    @property
    def created(self) -> dict[Path, set[Key]]:
        """Keys that this process made for epochs, by store. Ranks gather them for `remove_epochs`."""
        return self._created

    def collect(self) -> Collected:
        """Remove entries of this configuration for epochs before the current one, unless a process uses them."""
        return collect_before(self.current, self._config, self._index, self._encoders, self._folders)

    def close(self) -> None:
        """Stop a preparation in progress. The entries it has made are kept."""
        self._stop.set()
        if self._job is not None:
            self._job.join()
            self._job = None

    def _make(self, epoch: int) -> FilledCaches:
        open_caches = Caches(self._folders, writable=True, before_writing=self._before_writing)
        with _in_the_background(self._device), open_caches as caches:
            try:
                return build(
                    self._config, self._index, self._encoders, caches, epoch=epoch, part="epoch", options=self._options
                )
            finally:
                for store in caches.stores:
                    self._created.setdefault(store.folder, set()).update(store.created)


class _Job:
    """A background thread that encodes one epoch, and its result."""

    def __init__(self, make: _Make, epoch: int) -> None:
        self.epoch = epoch
        self._built: FilledCaches | None = None
        self._error: BaseException | None = None
        # A daemon thread: a run that fails must not wait for a pass, which can be continued at any time.
        self._thread = threading.Thread(target=self._run, args=(make,), name=f"gracetune-epoch-{epoch}", daemon=True)
        self._thread.start()

    def _run(self, make: _Make) -> None:
        try:
            self._built = make(self.epoch)
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            self._error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def result(self) -> FilledCaches:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._built is not None, "a thread without an error has a result"
        return self._built


def collect_before(
    epoch: int, config: RunConfig, index: DataIndex, encoders: Encoders, folders: CacheFolders
) -> Collected:  # fmt: skip
    """Remove entries of this configuration from the stores of earlier epochs, and leftovers of killed runs."""
    entries = size = 0
    in_use: list[Path] = []
    for parent in folders.epoch_folders():
        sweep_removed(parent)
    for old, folder in folders.epochs():
        if old >= epoch:
            continue
        wanted = needs(config, index, encoders, folders, epoch=old, part="epoch").all
        try:
            removal = remove_items(folder, [item for item in wanted if item.folder == folder])
        except CacheBusyError:
            in_use.append(folder)
            continue
        entries, size = entries + removal.entries, size + removal.size
    return Collected(entries, size, tuple(in_use))


def remove_epochs(created: Mapping[Path, Iterable[Key]]) -> EntryRemoval:
    """Remove the entries a run made for epochs, and stores that become empty, for `persistent_cache: false`.

    Raises CacheBusyError if a store is open; the caller must close its own first.
    """
    removals = [_without_empty(folder, keys) for folder, keys in created.items() if is_cache(folder)]
    return EntryRemoval(sum(one.entries for one in removals), sum(one.size for one in removals))


def remove_items(folder: Path, items: Sequence[LatentItem | TextItem]) -> EntryRemoval:
    """Remove items from the store of an epoch, and the store if it becomes empty. Raises CacheBusyError."""
    return _without_empty(folder, [item.key for item in items])


def _without_empty(folder: Path, keys: Iterable[Key]) -> EntryRemoval:
    with open_store(folder) as store:
        removal = remove(store, keys)
        if not store.keys() and not store.damaged:
            remove_if_empty(store)
    return removal


@contextmanager
def _in_the_background(device: torch.device | None) -> Iterator[None]:
    """Keep this thread and those it starts out of the way of training: low CPU priority, a separate CUDA stream."""
    # On Linux, priorities belong to threads, and new threads inherit them.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    if device is None or device.type != "cuda":
        yield
        return
    import torch

    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
