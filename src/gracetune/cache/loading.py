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
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gracetune.cache.errors import CacheError, CorruptEntryError, listed
from gracetune.cache.keys import Key
from gracetune.cache.manifest import Table, empty_table, merge
from gracetune.cache.reading import Located
from gracetune.cache.residence import Residence, Visits
from gracetune.cache.shards import Layout, layout_as_json, layout_from_json
from gracetune.cache.store import DiskStore
from gracetune.errors import Problem
from gracetune.memory.batch_hints import wish_of
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

INDEX_FORMAT = 2
_Maker: TypeAlias = "tuple[str, Tensor, int, int, tuple[int, ...], tuple[int, ...]]"
"""Name, typed slab, bytes of an element, offset, shape, strides."""
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
    on_gpu: tuple[str, ...] = ()
    """Tensors of a cache in host memory whose copies are at home on the GPU."""
    on_gpu_size: int = 0

    def lines(self) -> list[str]:
        """For people; the first says where, the others what is not as asked."""
        said = f"{self.name}: {self.entries:,} entries, {format_bytes(self.size)}, in {self.residence.place}"
        told = [f"{said} ({self.residence.reason})", *(f"{self.name}: {note}" for note in self.residence.notes)]
        if self.on_gpu:
            told.append(
                f"{self.name}: {', '.join(self.on_gpu)} ({format_bytes(self.on_gpu_size)}) at home on the GPU: small, "
                "and read in every step"
            )
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
        return cls(**{**known, "damaged": tuple(value["damaged"]), "on_gpu": tuple(value["on_gpu"])})


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
        """Its offset in the slab, and what lies where from there on."""
        row = self.row_of(key)
        return None if row is None else self.at(row)

    def at(self, row: int) -> tuple[int, Layout]:
        _, _, starts, layouts = self._columns
        return starts[row], self.layouts[layouts[row]]

    def row_of(self, key: Key) -> int | None:
        highs, lows, _, _ = self._columns
        high, low = int(key[:16], 16), int(key[16:], 16)
        row = bisect_left(highs, high)
        while row < len(highs) and highs[row] == high:
            if lows[row] == low:
                return row
            row += 1
        return None


@dataclass(frozen=True, eq=False)
class SmallTensors:
    """Tensors that have a slab of their own beside the entries they belong to: masks, pooled embeddings, sizes.

    They are read in every step and are a small part of a cache, so they can be at home on the GPU where all of it
    cannot. The entries keep their own copies.
    """

    names: tuple[str, ...]
    starts: NDArray[np.int64]
    """By row of the contents' table."""
    offsets: Mapping[Layout, Mapping[str, int]]
    """From there on."""
    size: int

    def fill(self, target: Tensor, slab: Tensor, contents: Contents) -> None:
        """Copy them out of the entries."""
        to, come = target.numpy(), slab.numpy()
        for number, layout in enumerate(contents.layouts):
            rows = np.flatnonzero(contents.table.layout == number)
            entries = contents.table.start[rows].astype(np.int64)
            for one in layout.tensors:
                if one.name in self.offsets[layout] and one.size:
                    _copy_stretches(
                        to, self.starts[rows] + self.offsets[layout][one.name], come, entries + one.offset, one.size
                    )


_GATHERED_AT_ONCE = 1 << 22
"""Bytes; the indexes for them take eight times as many."""


def _copy_stretches(
    to: NDArray[np.uint8], targets: NDArray[np.int64], come: NDArray[np.uint8], sources: NDArray[np.int64], size: int
) -> None:
    inside = np.arange(size)
    count = max(1, _GATHERED_AT_ONCE // size)
    for first in range(0, len(targets), count):
        part = slice(first, first + count)
        to[targets[part, None] + inside] = come[sources[part, None] + inside]


def choose_small(contents: Contents, limit: int) -> SmallTensors | None:
    """Of the tensors that belong on the GPU (`memory.batch_hints`) the smallest, as many as `limit` bytes hold."""
    counts = np.bincount(contents.table.layout, minlength=len(contents.layouts)).tolist()
    totals: dict[str, int] = {}
    for layout, count in zip(contents.layouts, counts, strict=True):
        for one in layout.tensors:
            wish = wish_of(one.name)
            if count and wish is not None and wish.home == "device":
                totals[one.name] = totals.get(one.name, 0) + count * _aligned(one.size)
    names, size = [], 0
    for name, total in sorted(totals.items(), key=lambda found: (found[1], found[0])):
        if size + total > limit:
            break
        names.append(name)
        size += total
    if not size:
        return None
    offsets: dict[Layout, dict[str, int]] = {}
    widths = []
    for layout in contents.layouts:
        own = offsets[layout] = {}
        width = 0
        for one in layout.tensors:
            if one.name in names:
                own[one.name] = width
                width += _aligned(one.size)
        widths.append(width)
    each = np.array(widths, np.int64)[contents.table.layout]
    starts = np.cumsum(each) - each
    return SmallTensors(tuple(names), starts, offsets, size)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


class Views:
    """Entries of a slab as tensors. One strided view for each: three times as fast as slicing bytes."""

    def __init__(self, slab: Tensor, contents: Contents, small: tuple[Tensor, SmallTensors] | None = None) -> None:
        """`small`: tensors that are read from a slab of their own, and where they lie in it."""
        from gracetune.storage.safetensors_files import TORCH_DTYPES

        dtypes = {one.dtype for layout in contents.layouts for one in layout.tensors}

        def by_dtype(slab: Tensor) -> dict[str, Tensor]:
            return {name: slab[: len(slab) // 8 * 8].view(TORCH_DTYPES[name]) for name in dtypes}

        def makers(typed: Mapping[str, Tensor], layout: Layout, offsets: Mapping[str, int]) -> list[_Maker]:
            return [
                (one.name, typed[one.dtype], TORCH_DTYPES[one.dtype].itemsize, offsets[one.name], one.shape,
                 _strides(one.shape))
                for one in layout.tensors if one.name in offsets
            ]  # fmt: skip

        self._contents = contents
        typed, apart = by_dtype(slab), {} if small is None else by_dtype(small[0])
        places = {} if small is None else small[1].offsets
        self._starts = None if small is None else small[1].starts.data
        self._makers, self._small_makers = {}, {}
        for layout in contents.layouts:
            own = places.get(layout, {})
            rest = {one.name: one.offset for one in layout.tensors if one.name not in own}
            self._makers[layout] = makers(typed, layout, rest)
            self._small_makers[layout] = makers(apart, layout, own)

    def find(self, key: Key) -> tuple[dict[str, Tensor], int] | None:
        """The entry's tensors and its bytes; None where it is not in the slab."""
        row = self._contents.row_of(key)
        if row is None:
            return None
        start, layout = self._contents.at(row)
        # Entries begin at multiples of 64 bytes, and tensors inside them at multiples of their element.
        tensors = {
            name: typed.as_strided(shape, strides, (start + offset) // itemsize)
            for name, typed, itemsize, offset, shape, strides in self._makers[layout]
        }
        if self._starts is not None:
            start = self._starts[row]
            tensors |= {
                name: typed.as_strided(shape, strides, (start + offset) // itemsize)
                for name, typed, itemsize, offset, shape, strides in self._small_makers[layout]
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
