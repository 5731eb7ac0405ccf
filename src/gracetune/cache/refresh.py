"""`cache_mode: refresh_each_epoch`: the next epoch's entries are made while this epoch trains.

    refresher = Refresher(config, index, encoders, places, epoch=0)     # epoch 0 was built before
    refresher.prepare_next()                                            # a thread, with encoders of its own
    ...                                                                 # epoch 0 is trained
    swap = refresher.swap()                                             # waits if it has to; epoch 1 is what counts now
    source.use(latents=...)                                             # stores of epoch 1; those of epoch 0 closed
    refresher.collect()                                                 # entries of epoch 0 are removed
    refresher.prepare_next()

Nothing is swapped before everything is there: what `current` names is always complete. Every epoch has stores of its
own (see places.py). They are collected when no process has them open; with several ranks the last one to leave an epoch
collects it, and what was in use is left for the next time. A killed run loses nothing: the next start finds what was
made for this epoch and for the next, and collects what is older.
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

from gracetune.cache.errors import CacheBusyError
from gracetune.cache.keys import Key
from gracetune.cache.made import MadeEntries
from gracetune.cache.passes import How
from gracetune.cache.places import Places
from gracetune.cache.session import Built, Caches, Encoders, build, is_cache, needs, open_store
from gracetune.cache.upkeep import Removal, remove, remove_if_empty, sweep_removed
from gracetune.cache.wanted import LatentItem, TextItem, is_refreshed
from gracetune.config.run_config import RunConfig
from gracetune.data.index import DataIndex, Unreadable

if TYPE_CHECKING:
    import torch

_Make = Callable[[int], Built]

NICENESS = 10
"""Of the thread that encodes, its decoders and torch's own threads for it: the step comes first."""


@dataclass(frozen=True)
class Swap:
    epoch: int
    """The one that counts now."""
    built: Built
    """`built.index` lacks files that turned out to be damaged: the loader has to exclude them."""
    waited: float
    """Seconds the caller waited because encoding took longer than the epoch."""


@dataclass(frozen=True)
class Collected:
    entries: int
    size: int
    in_use: tuple[Path, ...]
    """Stores of past epochs that somebody has open: they are left for the next time."""


class Refresher:
    """One for a run, where `wanted.is_refreshed(index)`."""

    def __init__(
        self,
        config: RunConfig,
        index: DataIndex,
        encoders: Encoders,
        places: Places,
        *,
        epoch: int = 0,
        device: torch.device | None = None,
        how: How | None = None,
        made: MadeEntries | None = None,
    ) -> None:
        """`epoch` is the one whose entries are there. On a CUDA `device` encoding has a stream of its own."""
        if not is_refreshed(index):
            raise ValueError("no dataset of this run has cache_mode: refresh_each_epoch")
        self.current = epoch
        self._config, self._index, self._encoders, self._places = config, index, encoders, places
        self._device = device
        self._before_writing = None if made is None else made.note
        self._stop = threading.Event()
        # An encoder that begins to tile beside the step would make entries this run does not look for.
        self._how = replace(how or How(), stop=self._stop, may_tile=False)
        self._created: dict[Path, set[Key]] = {}
        self._job: _Job | None = None

    def prepare_next(self) -> None:
        """Begin with the epoch after the current one; does nothing where that has begun."""
        if self._job is None:
            self._job = _Job(self._make, self.current + 1)

    def swap(self) -> Swap:
        """Wait for the next epoch's entries and make it the current one. What went wrong with them is raised here."""
        self.prepare_next()
        assert self._job is not None, "prepare_next made one"
        began = time.monotonic()
        job, self._job = self._job, None
        built = job.result()
        self._index = built.index
        self.current = job.epoch
        return Swap(job.epoch, built, time.monotonic() - began)

    def leave_out(self, unreadable: Unreadable) -> None:
        """Files that only other processes found to be damaged: from the next preparation on they are left out here."""
        self._index = self._index.without(unreadable)

    @property
    def created(self) -> dict[Path, set[Key]]:
        """What was made for epochs through this one, by store; several ranks gather theirs for `remove_epochs`."""
        return self._created

    def collect(self) -> Collected:
        """Remove what this run's configuration made for epochs before the current one, where nobody reads it."""
        return collect_before(self.current, self._config, self._index, self._encoders, self._places)

    def close(self) -> None:
        """End a preparation that is under way; what it has made stays."""
        self._stop.set()
        if self._job is not None:
            self._job.join()
            self._job = None

    def _make(self, epoch: int) -> Built:
        open_caches = Caches(self._places, writable=True, before_writing=self._before_writing)
        with _in_the_background(self._device), open_caches as caches:
            try:
                return build(
                    self._config, self._index, self._encoders, caches, epoch=epoch, part="epoch", how=self._how
                )
            finally:
                for store in caches.stores:
                    self._created.setdefault(store.folder, set()).update(store.created)


class _Job:
    """A thread and what came of it."""

    def __init__(self, make: _Make, epoch: int) -> None:
        self.epoch = epoch
        self._built: Built | None = None
        self._error: BaseException | None = None
        # A daemon: a run that ends in an error does not wait for a pass that can be gone on with at any time.
        self._thread = threading.Thread(target=self._run, args=(make,), name=f"gracetune-epoch-{epoch}", daemon=True)
        self._thread.start()

    def _run(self, make: _Make) -> None:
        try:
            self._built = make(self.epoch)
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            self._error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def result(self) -> Built:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._built is not None, "it ended without an error"
        return self._built


def collect_before(
    epoch: int, config: RunConfig, index: DataIndex, encoders: Encoders, places: Places
) -> Collected:  # fmt: skip
    """Entries of this configuration in the stores of epochs before this one; also what killed runs left of them."""
    entries = size = 0
    in_use: list[Path] = []
    for parent in places.epoch_folders():
        sweep_removed(parent)
    for old, folder in places.epochs():
        if old >= epoch:
            continue
        wanted = needs(config, index, encoders, places, epoch=old, part="epoch").all
        try:
            removal = remove_items(folder, [item for item in wanted if item.folder == folder])
        except CacheBusyError:
            in_use.append(folder)
            continue
        entries, size = entries + removal.entries, size + removal.size
    return Collected(entries, size, tuple(in_use))


def remove_epochs(created: Mapping[Path, Iterable[Key]]) -> Removal:
    """`persistent_cache: false`, at a clean end: from stores of epochs what a run has made; an empty one goes too.

    CacheBusyError where a store is still open; the caller closes its own first.
    """
    removals = [_without_empty(folder, keys) for folder, keys in created.items() if is_cache(folder)]
    return Removal(sum(one.entries for one in removals), sum(one.size for one in removals))


def remove_items(folder: Path, items: Sequence[LatentItem | TextItem]) -> Removal:
    """From the store of an epoch; one that has nothing left goes too. CacheBusyError."""
    return _without_empty(folder, [item.key for item in items])


def _without_empty(folder: Path, keys: Iterable[Key]) -> Removal:
    with open_store(folder) as store:
        removal = remove(store, keys)
        if not store.keys() and not store.damaged:
            remove_if_empty(store)
    return removal


@contextmanager
def _in_the_background(device: torch.device | None) -> Iterator[None]:
    """This thread, and those it starts, give way to the step: on the CPU by priority, on a GPU by a stream."""
    # Linux has a priority for every thread, and a new thread inherits it.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    if device is None or device.type != "cuda":
        yield
        return
    import torch

    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
