"""Verification of stored entries: read all bytes once; the store treats damaged entries as missing afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from gracetune.cache.errors import CorruptEntryError
from gracetune.cache.keys import Key
from gracetune.cache.maintenance import leave_out_damaged
from gracetune.cache.required_entries import LatentItem, TextItem, by_folder
from gracetune.cache.shards import DamagedFileError, read_shard
from gracetune.cache.store import DiskStore, LocatedEntries
from gracetune.units import MIB

OnChecked = Callable[[int, int], None]
"""Called with the bytes read so far and the total."""

_BUFFER_SIZE = 64 * MIB


def forget_damaged(
    store_of: Callable[[Path], DiskStore],
    items: Sequence[LatentItem | TextItem],
    on_checked: OnChecked = lambda done, total: None,
) -> int:
    """Read all items that are stored. Damaged ones count as missing from now on. Returns their number."""
    found = 0
    plans: list[tuple[DiskStore, LocatedEntries]] = []
    for folder, some in by_folder(items).items():
        store, keys = store_of(folder), [item.key for item in some]
        before = len(store.find(keys).present)
        leave_out_damaged(store)
        present = store.find(keys).present
        found += before - len(present)
        plans.append((store, store.locate(present)))
    total, done = sum(plan.total for _, plan in plans), 0
    for store, plan in plans:
        for chunk, size in _chunks(plan):
            found += _damaged_among(store, chunk)
            done += size
            on_checked(done, total)
    return found


def recheck_suspects(store: DiskStore) -> bool:
    """Read again the shards in which a damaged entry was found since the last call.

    Damaged entries count as missing from now on, also when the store is opened next time. Entries that were unreadable
    only for a moment are available again. Returns False if there were no such shards.
    """
    suspects = store.take_suspects()
    lost = 0
    for name in suspects:
        with store.mutex:
            store.catalogue.drop_shards([name] if name in store.catalogue.sizes else [])
            store.refresh()  # reads its header again, or notices that it is damaged or gone
        with suppress(DamagedFileError, OSError):
            keys = [entry.key for entry in read_shard(store.shards_folder / name).entries()]
            plan, _ = store.locate_present(keys)
            for chunk, _ in _chunks(plan):
                lost += _damaged_among(store, chunk)
    store.take_suspects()
    # The index records the loss for the next opening. Without an index that opening reads all headers, so it finds a
    # damaged header by itself, but it cannot see damaged data.
    if lost or (suspects and store.has_index):
        store.save_index()
    return bool(suspects)


def _chunks(plan: LocatedEntries) -> Iterator[tuple[tuple[Key, ...], int]]:
    """Consecutive keys whose entries fit into a buffer (at least one key), with their size in bytes."""
    first = size = 0
    for at, one in enumerate(plan.sizes.tolist()):
        if at > first and size + one > _BUFFER_SIZE:
            yield plan.keys[first:at], size
            first, size = at, 0
        size += one
    if plan.keys:
        yield plan.keys[first:], size


def _damaged_among(store: DiskStore, keys: tuple[Key, ...]) -> int:
    import torch

    # The look-ahead reads at the same time: it may have found some of them damaged meanwhile.
    plan, missing = store.locate_present(keys)
    if not plan.keys:
        return len(missing)
    ends = np.cumsum(plan.sizes)
    buffer = torch.empty(int(ends[-1]), dtype=torch.uint8)
    try:
        store.read_into(plan, buffer, ends - plan.sizes)
    except CorruptEntryError as error:
        return len(missing) + len(error.keys)
    return len(missing)
