"""Every byte of what is wanted and there, read once: what is damaged counts as missing afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from gracetune.cache.errors import CorruptEntryError
from gracetune.cache.keys import Key
from gracetune.cache.shards import DamagedFileError, read_shard
from gracetune.cache.store import DiskStore, Located
from gracetune.cache.upkeep import leave_out_damaged
from gracetune.cache.wanted import LatentItem, TextItem, by_folder
from gracetune.units import MIB

OnChecked = Callable[[int, int], None]
"""Bytes that were read, and how many there are."""

_AT_ONCE = 64 * MIB


def forget_damaged(
    store_of: Callable[[Path], DiskStore],
    items: Sequence[LatentItem | TextItem],
    on_checked: OnChecked = lambda done, total: None,
) -> int:
    """Read all of them that are there; those whose bytes are wrong count as missing from here on. Returns how many."""
    found = 0
    plans: list[tuple[DiskStore, Located]] = []
    for folder, some in by_folder(items).items():
        store, keys = store_of(folder), [item.key for item in some]
        before = len(store.find(keys).present)
        leave_out_damaged(store)
        present = store.find(keys).present
        found += before - len(present)
        plans.append((store, store.locate(present)))
    total, done = sum(plan.total for _, plan in plans), 0
    for store, plan in plans:
        for some_keys, size in _pieces(plan):
            found += _damaged_among(store, some_keys)
            done += size
            on_checked(done, total)
    return found


def recheck_suspects(store: DiskStore) -> bool:
    """Read the files anew in which an entry was found to be damaged since the last call. Entries that are not as they
    were written count as missing from here on, also at the next opening; one that only could not be read for a moment
    is there again.

    False where there were no such files.
    """
    suspects = store.take_suspects()
    lost = 0
    for name in suspects:
        with store.mutex:
            store.catalogue.drop_shards([name] if name in store.catalogue.sizes else [])
            store.refresh()  # which learns what is in it, or that it is damaged or gone
        with suppress(DamagedFileError, OSError):
            keys = [entry.key for entry in read_shard(store.shards_folder / name).entries()]
            for some_keys, _ in _pieces(store.locate(store.find(keys).present)):
                lost += _damaged_among(store, some_keys)
    store.take_suspects()
    if lost or (suspects and store.has_index):  # a file that cannot be read at all tells the next opening so itself
        store.save_index()
    return bool(suspects)


def _pieces(plan: Located) -> Iterator[tuple[tuple[Key, ...], int]]:
    """So many entries as fit into a small buffer, or one; with their bytes."""
    first = size = 0
    for at, one in enumerate(plan.sizes.tolist()):
        if at > first and size + one > _AT_ONCE:
            yield plan.keys[first:at], size
            first, size = at, 0
        size += one
    if plan.keys:
        yield plan.keys[first:], size


def _damaged_among(store: DiskStore, keys: tuple[Key, ...]) -> int:
    import torch

    plan = store.locate(keys)
    ends = np.cumsum(plan.sizes)
    buffer = torch.empty(int(ends[-1]), dtype=torch.uint8)
    try:
        store.read_into(plan, buffer, ends - plan.sizes)
    except CorruptEntryError as error:
        return len(error.keys)
    return 0
