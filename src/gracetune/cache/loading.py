"""What of a cache is brought into memory, and the index of what was: decided first, then read.

The index that local rank 0 hands to the others: eight bytes (the length of what follows, little-endian), a JSON object
with `format`, `rows`, `layouts`, `residence` and `report`, then the columns of the table one after the other.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gracetune.cache.errors import CacheError, CorruptEntryError, listed
from gracetune.cache.keys import Key
from gracetune.cache.manifest import Table, empty_table, merge
from gracetune.cache.reading import Located
from gracetune.cache.shards import Layout, layout_as_json, layout_from_json
from gracetune.cache.slabs import Residence
from gracetune.cache.store import DiskStore
from gracetune.cache.visits import Visits
from gracetune.errors import Problem
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

INDEX_FORMAT = 1
_COLUMNS = ("high", "low", "shard", "layout", "start", "checksum")


@dataclass(frozen=True)
class LoadReport:
    """What lies where."""

    name: str
    residence: Residence
    entries: int = 0
    """In memory."""
    size: int = 0
    on_disk: int = 0
    """Entries left there, the ones read least."""
    on_disk_size: int = 0
    why_on_disk: str = ""
    missing: int = 0
    """Entries the run wants and the cache does not have."""
    damaged: tuple[Key, ...] = ()
    """Found while loading; the store counts them as missing from here on."""
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """For people; the first says where, the others what is not as asked."""
        said = f"{self.name}: {self.entries:,} entries, {format_bytes(self.size)}, in {self.residence.place}"
        told = [f"{said} ({self.residence.reason})", *self.residence.notes]
        if self.on_disk:
            told.append(
                f"{self.on_disk:,} entries, {format_bytes(self.on_disk_size)}, stay on disk: {self.why_on_disk}"
            )
        if self.damaged:
            told.append(f"{len(self.damaged):,} entries are damaged and have to be made again: {listed(self.damaged)}")
        if self.missing:
            told.append(f"{self.missing:,} entries are missing: gracetune cache build CONFIG encodes them")
        return told

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LoadReport:
        residence = value["residence"]
        known = {**value, "residence": Residence(**{**residence, "notes": tuple(residence["notes"])})}
        return cls(**{**known, "damaged": tuple(value["damaged"])})


@dataclass(frozen=True, eq=False)
class Selection:
    """Of the entries a run wants: what is brought into memory, store by store, and what is not."""

    chosen: tuple[tuple[DiskStore, Located], ...]
    size: int
    left: tuple[Key, ...]
    left_size: int
    missing: tuple[Key, ...]


def select(stores: Sequence[DiskStore], visits: Mapping[Key, Visits], budget: int | None) -> Selection:
    """The hottest entries that fit the budget; of equally hot ones those that come first in the files."""
    plans, missing = [], tuple(visits)
    for store in stores:  # the first that has an entry gives it
        plan, missing = store.locate_present(missing)
        plans.append((store, plan))
    total = sum(plan.total for _, plan in plans)
    if budget is None or total <= budget:
        return Selection(tuple(one for one in plans if len(one[1])), total, (), 0, missing)
    sizes = np.concatenate([np.empty(0, np.int64), *(plan.sizes for _, plan in plans)])
    order = _hottest_first([visits[key] for _, plan in plans for key in plan.keys])
    taken = np.zeros(len(order), np.bool_)
    taken[order[np.cumsum(sizes[order]) <= budget]] = True
    chosen, left, begin = [], list[Key](), 0
    for store, plan in plans:
        here = taken[begin : begin + len(plan)]
        begin += len(plan)
        left += [plan.keys[at] for at in np.flatnonzero(~here).tolist()]
        if here.any():
            chosen.append((store, plan.part(here)))
    return Selection(tuple(chosen), int(sizes[taken].sum()), tuple(left), int(sizes[~taken].sum()), missing)


def _hottest_first(visits: Sequence[Visits]) -> NDArray[np.intp]:
    often = np.array([one.per_epoch for one in visits], np.float64)
    likely = np.array([one.probability for one in visits], np.float64)
    return np.lexsort((np.arange(len(visits)), -likely, -often))


@dataclass(frozen=True, eq=False)
class Contents:
    """What lies in a slab."""

    table: Table
    """`start` is the offset in the slab."""
    layouts: tuple[Layout, ...]

    @cached_property
    def _columns(self) -> tuple[memoryview, memoryview, memoryview, memoryview]:
        """Single values come out of these five times as fast as out of arrays."""
        table = self.table
        return table.high.data, table.low.data, table.start.data, table.layout.data

    def find(self, key: Key) -> tuple[int, Layout] | None:
        highs, lows, starts, layouts = self._columns
        high, low = int(key[:16], 16), int(key[16:], 16)
        row = bisect_left(highs, high)
        while row < len(highs) and highs[row] == high:
            if lows[row] == low:
                return starts[row], self.layouts[layouts[row]]
            row += 1
        return None


class Views:
    """Entries of a slab as tensors. One strided view for each: three times as fast as slicing bytes."""

    def __init__(self, slab: Tensor, contents: Contents) -> None:
        from gracetune.memory.weights.destinations import TORCH_DTYPES

        dtypes = {one.dtype for layout in contents.layouts for one in layout.tensors}
        typed = {name: slab[: len(slab) // 8 * 8].view(TORCH_DTYPES[name]) for name in dtypes}
        self._contents = contents
        self._makers = {
            layout: [
                (
                    one.name,
                    typed[one.dtype],
                    TORCH_DTYPES[one.dtype].itemsize,
                    one.offset,
                    one.shape,
                    _strides(one.shape),
                )
                for one in layout.tensors
            ]
            for layout in contents.layouts
        }

    def find(self, key: Key) -> tuple[dict[str, Tensor], int] | None:
        """The entry's tensors and its bytes; None where it is not in the slab."""
        found = self._contents.find(key)
        if found is None:
            return None
        start, layout = found
        # Entries begin at multiples of 64 bytes, and tensors inside them at multiples of their element.
        tensors = {
            name: typed.as_strided(shape, strides, (start + offset) // itemsize)
            for name, typed, itemsize, offset, shape, strides in self._makers[layout]
        }
        return tensors, layout.size


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[side + 1 :]) for side in range(len(shape)))


def load_into(slab: Tensor, selection: Selection, threads: int | None) -> tuple[Contents, tuple[Key, ...]]:
    """Read every chosen entry into its place, checking it; returns also the damaged ones, which have none."""
    plans, damaged, base = [], set[Key](), 0
    for store, plan in selection.chosen:
        offsets = base + np.concatenate([[0], np.cumsum(plan.sizes)[:-1]]).astype(np.int64)
        base += plan.total
        try:
            store.read_into(plan, slab, offsets, threads=threads)
        except CorruptEntryError as error:
            damaged.update(Key(key) for key in error.keys)
        plans.append((plan, offsets))
    return _contents(plans, damaged), tuple(sorted(damaged))


def _contents(plans: Sequence[tuple[Located, NDArray[np.int64]]], damaged: set[Key]) -> Contents:
    numbers: dict[Layout, int] = {}
    tables = [empty_table()]
    for plan, offsets in plans:
        known = np.array([numbers.setdefault(layout, len(numbers)) for layout in plan.kinds], np.uint32)
        own, zeros = plan.table, np.zeros(len(plan), np.uint32)
        table = Table(own.high, own.low, zeros, known[own.layout], offsets.astype(np.uint64), own.checksum)
        chosen = plan.by_key
        if damaged:
            chosen = chosen[[plan.keys[row] not in damaged for row in chosen.tolist()]]
        tables.append(table.rows(chosen))
    return Contents(merge(tables), tuple(numbers))


def pack_index(contents: Contents, report: LoadReport) -> bytes:
    said = {
        "format": INDEX_FORMAT,
        "rows": len(contents.table),
        "layouts": [layout_as_json(layout) for layout in contents.layouts],
        "report": report.as_json(),
    }
    text = json.dumps(said).encode()
    columns = contents.table.columns()
    return len(text).to_bytes(8, "little") + text + b"".join(columns[name].tobytes() for name in _COLUMNS)


def unpack_index(raw: bytes) -> tuple[Contents, LoadReport]:
    end = 8 + int.from_bytes(raw[:8], "little")
    said = json.loads(raw[8:end])
    if said["format"] != INDEX_FORMAT:
        found, hint = f"format {said['format']}", "run the same gracetune in all processes"
        raise CacheError(Problem("index of rank 0", found, f"format {INDEX_FORMAT}", hint))
    columns = {}
    for one in fields(Table):
        kind = np.dtype(np.uint32 if one.name in ("shard", "layout") else np.uint64)
        size = said["rows"] * kind.itemsize
        columns[one.name] = np.frombuffer(raw[end : end + size], kind).copy()  # aligned, wherever it was
        end += size
    layouts = tuple(layout_from_json(one) for one in said["layouts"])
    return Contents(Table(**columns), layouts), LoadReport.from_json(said["report"])
