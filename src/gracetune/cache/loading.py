"""Loading of cache entries into a slab: select them, read them, and index the result.

Local rank 0 passes the index to the other ranks in this format: the length of the JSON text (eight bytes,
little-endian), the JSON object with `format`, `rows`, `layouts` and `report`, then the columns of the table, one
after the other.
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
from gracetune.cache.manifest import EntryTable, empty_table, merge
from gracetune.cache.reading import LocatedEntries
from gracetune.cache.residence import Residence, Visits
from gracetune.cache.shards import ALIGNMENT, EntryLayout, layout_as_json, layout_from_json
from gracetune.cache.store import DiskStore
from gracetune.errors import Problem
from gracetune.memory.tensor_hints import hint_of
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

INDEX_FORMAT = 2
_ViewSpec: TypeAlias = "tuple[str, Tensor, int, int, tuple[int, ...], tuple[int, ...]]"
"""Name, slab as a tensor of the right dtype, element size, offset in the entry, shape, strides."""
_COLUMNS = ("high", "low", "shard", "layout", "start", "checksum")


@dataclass(frozen=True)
class CacheLoadReport:
    """What was loaded, and where it is."""

    name: str
    residence: Residence
    entries: int = 0
    """Entries in memory."""
    size: int = 0
    """Bytes, as all sizes here."""
    on_disk: int = 0
    """Entries that stay on disk, the least frequently read ones."""
    on_disk_size: int = 0
    why_on_disk: str = ""
    missing: int = 0
    """Entries that the run uses but the cache does not contain."""
    damaged: tuple[Key, ...] = ()
    """Damaged entries found while loading. The store now treats them as missing."""
    seconds: float = 0.0
    on_gpu: tuple[str, ...] = ()
    """Names of the small tensors that have an additional copy on the GPU."""
    on_gpu_size: int = 0

    def lines(self) -> list[str]:
        """The report as text: first the place of the cache, then everything unusual."""
        summary = f"{self.name}: {self.entries:,} entries, {format_bytes(self.size)}, in {self.residence.kind}"
        lines = [f"{summary} ({self.residence.reason})", *(f"{self.name}: {note}" for note in self.residence.notes)]
        if self.on_gpu:
            lines.append(
                f"{self.name}: {', '.join(self.on_gpu)} ({format_bytes(self.on_gpu_size)}) placed on the GPU: small, "
                "and read in every step"
            )
        if self.on_disk:
            lines.append(
                f"{self.on_disk:,} entries, {format_bytes(self.on_disk_size)}, stay on disk: {self.why_on_disk}"
            )
        if self.damaged:
            lines.append(f"{len(self.damaged):,} entries are damaged and must be encoded again: {listed(self.damaged)}")
        if self.missing:
            lines.append(f"{self.missing:,} entries are missing; run `gracetune cache build CONFIG` to encode them")
        return lines

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CacheLoadReport:
        residence = value["residence"]
        values = {**value, "residence": Residence(**{**residence, "notes": tuple(residence["notes"])})}
        return cls(**{**values, "damaged": tuple(value["damaged"]), "on_gpu": tuple(value["on_gpu"])})


@dataclass(frozen=True, eq=False)
class EntrySelection:
    """The entries to load, by store, and those that stay on disk or are missing."""

    chosen: tuple[tuple[DiskStore, LocatedEntries], ...]
    size: int
    """Bytes of the chosen entries."""
    left: tuple[Key, ...]
    """Entries that stay on disk."""
    left_size: int
    missing: tuple[Key, ...]


def select(stores: Sequence[DiskStore], visits: Mapping[Key, Visits], budget: int | None) -> EntrySelection:
    """Choose the most frequently read entries that fit `budget` bytes; None means all. Ties are broken by the order in
    the files."""
    plans, missing = [], tuple(visits)
    for store in stores:  # an entry in several stores is taken from the first of them
        plan, missing = store.locate_present(missing)
        plans.append((store, plan))
    total = sum(plan.total for _, plan in plans)
    if budget is None or total <= budget:
        chosen_plans = tuple(one for one in plans if len(one[1]))
        return EntrySelection(chosen_plans, size=total, left=(), left_size=0, missing=missing)
    sizes = np.concatenate([np.empty(0, np.int64), *(plan.sizes for _, plan in plans)])
    order = _hottest_first([visits[key] for _, plan in plans for key in plan.keys])
    taken = np.zeros(len(order), np.bool_)
    taken[order[np.cumsum(sizes[order]) <= budget]] = True
    chosen, left, begin = [], list[Key](), 0
    for store, plan in plans:
        mask = taken[begin : begin + len(plan)]
        begin += len(plan)
        left += [plan.keys[at] for at in np.flatnonzero(~mask).tolist()]
        if mask.any():
            chosen.append((store, plan.part(mask)))
    return EntrySelection(tuple(chosen), int(sizes[taken].sum()), tuple(left), int(sizes[~taken].sum()), missing)


def _hottest_first(visits: Sequence[Visits]) -> NDArray[np.intp]:
    per_epoch = np.array([one.per_epoch for one in visits], np.float64)
    probability = np.array([one.probability for one in visits], np.float64)
    return np.lexsort((np.arange(len(visits)), -probability, -per_epoch))  # the last key is the primary one


@dataclass(frozen=True, eq=False)
class Contents:
    """The index of a slab."""

    table: EntryTable
    """Its column `start` holds offsets in the slab."""
    layouts: tuple[EntryLayout, ...]

    @cached_property
    def _columns(self) -> tuple[memoryview, memoryview, memoryview, memoryview]:
        """Memoryviews of the columns. Reading single values from them is five times as fast as from arrays."""
        table = self.table
        return table.high.data, table.low.data, table.start.data, table.layout.data

    def find(self, key: Key) -> tuple[int, EntryLayout] | None:
        """The offset of the entry in the slab, and its layout; None if it is absent."""
        row = self.row_of(key)
        return None if row is None else self.at(row)

    def at(self, row: int) -> tuple[int, EntryLayout]:
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
    """The layout of a second slab for small tensors of the entries: masks, pooled embeddings, sizes.

    They are read in every step but are a small part of a cache, so they fit on the GPU even if the whole cache does
    not. The entries keep their own copies.
    """

    names: tuple[str, ...]
    starts: NDArray[np.int64]
    """Start of each entry's small tensors in the second slab, by row of the contents' table."""
    offsets: Mapping[EntryLayout, Mapping[str, int]]
    """Offset of each tensor relative to `starts`."""
    size: int

    def fill(self, target: Tensor, slab: Tensor, contents: Contents) -> None:
        """Copy the small tensors from the entries in `slab` to `target`."""
        to, source = target.numpy(), slab.numpy()
        for number, layout in enumerate(contents.layouts):
            rows = np.flatnonzero(contents.table.layout == number)
            entries = contents.table.start[rows].astype(np.int64)
            for one in layout.tensors:
                if one.name in self.offsets[layout] and one.size:
                    _copy_ranges(
                        to, self.starts[rows] + self.offsets[layout][one.name], source, entries + one.offset, one.size
                    )


_BYTES_PER_GATHER = 1 << 22
"""The int64 index array of one gather is eight times as large."""


def _copy_ranges(
    to: NDArray[np.uint8], targets: NDArray[np.int64], source: NDArray[np.uint8], starts: NDArray[np.int64], size: int
) -> None:
    """For each i, copy `size` bytes from `source[starts[i]]` to `to[targets[i]]`, by fancy indexing in chunks."""
    inside = np.arange(size)
    count = max(1, _BYTES_PER_GATHER // size)
    for first in range(0, len(targets), count):
        part = slice(first, first + count)
        to[targets[part, None] + inside] = source[starts[part, None] + inside]


def choose_small(contents: Contents, limit: int) -> SmallTensors | None:
    """Choose the smallest of the tensors that belong on the GPU (`memory.tensor_hints`), up to `limit` bytes in total.

    A tensor name is chosen for all entries or for none.
    """
    counts = np.bincount(contents.table.layout, minlength=len(contents.layouts)).tolist()
    totals: dict[str, int] = {}
    for layout, count in zip(contents.layouts, counts, strict=True):
        for one in layout.tensors:
            hint = hint_of(one.name)
            if count and hint is not None and hint.home == "device":
                totals[one.name] = totals.get(one.name, 0) + count * _aligned(one.size)
    names, size = [], 0
    for name, total in sorted(totals.items(), key=lambda found: (found[1], found[0])):
        if size + total > limit:
            break
        names.append(name)
        size += total
    if not size:
        return None
    offsets: dict[EntryLayout, dict[str, int]] = {}
    widths = []
    for layout in contents.layouts:
        of_layout = offsets[layout] = {}
        width = 0
        for one in layout.tensors:
            if one.name in names:
                of_layout[one.name] = width
                width += _aligned(one.size)
        widths.append(width)
    per_entry = np.array(widths, np.int64)[contents.table.layout]
    starts = np.cumsum(per_entry) - per_entry  # exclusive prefix sum
    return SmallTensors(tuple(names), starts, offsets, size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Views:
    """Entries of a slab as tensors.

    Each tensor is one `as_strided` of the slab in its dtype, which is three times as fast as slicing and viewing bytes.
    """

    def __init__(self, slab: Tensor, contents: Contents, small: tuple[Tensor, SmallTensors] | None = None) -> None:
        """`small`: the second slab and its layout. Tensors in it are read from there."""
        from gracetune.storage.safetensors_files import TORCH_DTYPES

        dtypes = {one.dtype for layout in contents.layouts for one in layout.tensors}

        def by_dtype(slab: Tensor) -> dict[str, Tensor]:
            return {name: slab[: len(slab) // 8 * 8].view(TORCH_DTYPES[name]) for name in dtypes}

        def specs(typed: Mapping[str, Tensor], layout: EntryLayout, offsets: Mapping[str, int]) -> list[_ViewSpec]:
            return [
                (one.name, typed[one.dtype], TORCH_DTYPES[one.dtype].itemsize, offsets[one.name], one.shape,
                 _strides(one.shape))
                for one in layout.tensors if one.name in offsets
            ]  # fmt: skip

        self._contents = contents
        typed, typed_small = by_dtype(slab), {} if small is None else by_dtype(small[0])
        small_offsets = {} if small is None else small[1].offsets
        self._small_starts = None if small is None else small[1].starts.data
        self._specs, self._small_specs = {}, {}
        for layout in contents.layouts:
            in_small = small_offsets.get(layout, {})
            in_entry = {one.name: one.offset for one in layout.tensors if one.name not in in_small}
            self._specs[layout] = specs(typed, layout, in_entry)
            self._small_specs[layout] = specs(typed_small, layout, in_small)

    def find(self, key: Key) -> tuple[dict[str, Tensor], int] | None:
        """The tensors of an entry and its size in bytes; None if it is not in the slab."""
        row = self._contents.row_of(key)
        if row is None:
            return None
        start, layout = self._contents.at(row)
        # The division is exact: entries start at multiples of 64 bytes, their tensors at multiples of the element size.
        tensors = {
            name: typed.as_strided(shape, strides, (start + offset) // itemsize)
            for name, typed, itemsize, offset, shape, strides in self._specs[layout]
        }
        if self._small_starts is not None:
            start = self._small_starts[row]
            tensors |= {
                name: typed.as_strided(shape, strides, (start + offset) // itemsize)
                for name, typed, itemsize, offset, shape, strides in self._small_specs[layout]
            }
        return tensors, layout.size


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def load_into(slab: Tensor, selection: EntrySelection, threads: int | None) -> tuple[Contents, tuple[Key, ...]]:
    """Read and verify the selected entries. Returns the index of the slab, and the keys of damaged entries."""
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


def _contents(plans: Sequence[tuple[LocatedEntries, NDArray[np.int64]]], damaged: set[Key]) -> Contents:
    """Merge the tables of several stores into one, with common layout numbers and offsets in the slab."""
    numbers: dict[EntryLayout, int] = {}
    tables = [empty_table()]
    for plan, offsets in plans:
        renumbered = np.array([numbers.setdefault(layout, len(numbers)) for layout in plan.kinds], np.uint32)
        old, zeros = plan.table, np.zeros(len(plan), np.uint32)
        table = EntryTable(old.high, old.low, zeros, renumbered[old.layout], offsets.astype(np.uint64), old.checksum)
        chosen = plan.by_key
        if damaged:
            chosen = chosen[[plan.keys[row] not in damaged for row in chosen.tolist()]]
        tables.append(table.rows(chosen))
    return Contents(merge(tables), tuple(numbers))


def pack_index(contents: Contents, report: CacheLoadReport) -> bytes:
    """Serialize the index for other ranks; the format is described at the top of this file."""
    header = {
        "format": INDEX_FORMAT,
        "rows": len(contents.table),
        "layouts": [layout_as_json(layout) for layout in contents.layouts],
        "report": report.as_json(),
    }
    text = json.dumps(header).encode()
    columns = contents.table.columns()
    return len(text).to_bytes(8, "little") + text + b"".join(columns[name].tobytes() for name in _COLUMNS)


def unpack_index(raw: bytes) -> tuple[Contents, CacheLoadReport]:
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    if header["format"] != INDEX_FORMAT:
        found, hint = f"format {header['format']}", "run the same version of gracetune in all processes"
        raise CacheError(Problem("index of rank 0", found, f"format {INDEX_FORMAT}", hint))
    columns = {}
    for one in fields(EntryTable):
        dtype = np.dtype(np.uint32 if one.name in ("shard", "layout") else np.uint64)
        size = header["rows"] * dtype.itemsize
        columns[one.name] = np.frombuffer(raw[end : end + size], dtype).copy()  # the copy is aligned
        end += size
    layouts = tuple(layout_from_json(one) for one in header["layouts"])
    return Contents(EntryTable(**columns), layouts), CacheLoadReport.from_json(header["report"])
