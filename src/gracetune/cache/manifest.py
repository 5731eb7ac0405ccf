"""The catalogue of a cache: where each entry is stored, as sorted columns, and the index file that preserves it.

The index file (`index.safetensors`) is only an accelerator. It repeats the content of the shard headers, is written
atomically and protected by checksums. If it is missing, outdated or damaged, it is rebuilt from the shards. A key may
occur more than once (two processes encoded the same sample); either copy is valid.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from gracetune.cache.keys import Key
from gracetune.cache.shards import (
    DamagedFileError,
    EntryLayout,
    Shard,
    layout_as_json,
    layout_from_json,
    pack_header,
    read_header,
)
from gracetune.storage.atomic import write_file
from gracetune.storage.safetensors_headers import read_fully

INDEX_FORMAT = "gracetune-cache-index 1"
_EMPTY = np.empty(0, np.uint64)
_DTYPES = {np.dtype(np.uint64): "U64", np.dtype(np.uint32): "U32"}

U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class EntryTable:
    """One row per copy of an entry, sorted by key. A key that is stored twice has two rows.

    This is the table of a `Catalogue`. Those of `LocatedEntries` and `Contents` differ in order and meaning; see there.
    Stored as columns (a structure of arrays), because a binary search reads only `high` and `low`.
    """

    high: U64
    """The first eight bytes of the key, as a big-endian number."""
    low: U64
    """The last eight bytes."""
    shard: U32
    """Position in `Catalogue.shards`."""
    layout: U32
    """Position in `Catalogue.layouts`."""
    start: U64
    """Bytes from the start of the shard's file."""
    checksum: U64
    """xxh3-64 of the entry's bytes."""

    def __len__(self) -> int:
        return len(self.high)

    def columns(self) -> dict[str, U64 | U32]:
        return {one.name: self.__dict__[one.name] for one in fields(self)}

    def rows(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> EntryTable:
        return EntryTable(**{name: column[chosen] for name, column in self.columns().items()})  # type: ignore[arg-type]

    def copies(self, high: int, low: int) -> list[int]:
        """The rows that have this key."""
        row = int(np.searchsorted(self.high, np.uint64(high)))
        found = []
        while row < len(self) and int(self.high[row]) == high:
            if int(self.low[row]) == low:
                found.append(row)
            row += 1
        return found

    def find(self, high: U64, low: U64) -> NDArray[np.intp]:
        """The first row of each key, or -1 if the key is absent."""
        rows = np.searchsorted(self.high, high)
        found = np.full(len(high), -1, np.intp)
        pending = np.arange(len(high))
        while len(pending):  # a second iteration is needed only if two keys share their first half
            pending = pending[rows[pending] < len(self)]
            pending = pending[self.high[rows[pending]] == high[pending]]
            matches = self.low[rows[pending]] == low[pending]
            found[pending[matches]] = rows[pending[matches]]
            pending = pending[~matches]
            rows[pending] += 1
        return found


def split_keys(keys: Sequence[Key]) -> tuple[U64, U64]:
    halves = np.frombuffer(bytes.fromhex("".join(keys)), ">u8").astype(np.uint64).reshape(-1, 2)
    return np.ascontiguousarray(halves[:, 0]), np.ascontiguousarray(halves[:, 1])


def join_keys(table: EntryTable) -> list[Key]:
    raw = np.stack([table.high, table.low], axis=1).astype(">u8").tobytes().hex()
    return [Key(raw[at : at + 32]) for at in range(0, len(raw), 32)]


def merge(tables: Sequence[EntryTable]) -> EntryTable:
    filled = [table for table in tables if len(table)]
    if len(filled) < 2:
        return filled[0] if filled else empty_table()
    columns = empty_table().columns()
    joined = EntryTable(**{name: np.concatenate([table.columns()[name] for table in filled]) for name in columns})
    return joined.rows(by_key(joined.high, joined.low))


def by_key(high: U64, low: U64) -> NDArray[np.intp]:
    """The permutation that sorts keys.

    Sorting by the first halves is much faster and suffices unless two of them are equal (usually a duplicate key).
    """
    order = np.argsort(high)
    ordered = high[order]
    return np.lexsort((low, high)) if np.any(ordered[1:] == ordered[:-1]) else order


def empty_table() -> EntryTable:
    kinds = (np.uint64, np.uint64, np.uint32, np.uint32, np.uint64, np.uint64)
    return EntryTable(*(np.empty(0, kind) for kind in kinds))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of one shard: adjacent entries with a common checksum. Runs of a single entry are left out."""

    start: U64
    size: U64
    """Bytes."""
    checksum: U64

    @classmethod
    def of(cls, shard: Shard) -> Runs:
        counts = np.array([count for count, _ in shard.runs], np.intp)
        ends = np.cumsum(counts)
        several = counts > 1
        first, last = (ends - counts)[several], ends[several] - 1
        starts = np.array([row[1] for row in shard.rows], np.uint64) + np.uint64(shard.data_start)
        sizes = np.array([shard.layouts[row[2]].size for row in shard.rows], np.uint64)
        checksums = _numbers([summary for _, summary in shard.runs])
        return cls(starts[first], starts[last] + sizes[last] - starts[first], checksums[several])


def _numbers(summaries: Sequence[str]) -> U64:
    return np.frombuffer(bytes.fromhex("".join(summaries)), ">u8").astype(np.uint64)


@dataclass(frozen=True)
class EntryCopy:
    """One copy of an entry."""

    shard: str
    """The file's name."""
    layout: EntryLayout
    start: int
    """Bytes from the start of the file."""
    checksum: int


class Catalogue:
    """All entries that a process knows of. Not thread-safe: the store holds its lock around every call."""

    def __init__(self) -> None:
        self.shards: list[str] = []
        """Names by shard number. Numbers are never reused, so the names of removed shards stay in the list."""
        self.sizes: dict[str, int] = {}
        """File sizes of the shards that exist."""
        self.layouts: list[EntryLayout] = []
        self.runs: dict[str, Runs] = {}
        """Runs of the shards that exist."""
        self._numbers: dict[str, int] = {}
        self._layout_numbers: dict[EntryLayout, int] = {}
        self._tables: list[EntryTable] = []

    def __len__(self) -> int:
        """The number of entries, duplicates included."""
        return sum(len(table) for table in self._tables)

    def add(self, shard: Shard) -> None:
        if shard.name in self.sizes:  # another thread already found the new file in the folder
            return
        rows = shard.rows
        number = self._number(shard.name, shard.size)
        layouts = np.array([self._layout_number(layout) for layout in shard.layouts], np.uint32)
        high, low = split_keys(shard.keys)
        table = EntryTable(
            high,
            low,
            np.full(len(rows), number, np.uint32),
            layouts[[row[2] for row in rows]],
            np.array([row[1] for row in rows], np.uint64) + np.uint64(shard.data_start),
            _numbers([row[3] for row in rows]),
        )
        self.runs[shard.name] = Runs.of(shard)
        self._append(table.rows(by_key(high, low)))

    def _append(self, table: EntryTable) -> None:
        """Add a table, then merge until each table is at most half as long as the one before.

        As in a log-structured merge tree, n entries need O(log n) tables and a row is merged O(log n) times.
        """
        self._tables.append(table)
        while len(self._tables) > 1 and 2 * len(self._tables[-1]) > len(self._tables[-2]):
            self._tables.append(merge([self._tables.pop(), self._tables.pop()]))

    def _number(self, name: str, size: int) -> int:
        self._numbers[name] = len(self.shards)
        self.sizes[name] = size
        self.shards.append(name)
        return self._numbers[name]

    def _layout_number(self, layout: EntryLayout) -> int:
        number = self._layout_numbers.setdefault(layout, len(self.layouts))
        if number == len(self.layouts):
            self.layouts.append(layout)
        return number

    def drop_shards(self, names: Iterable[str]) -> None:
        gone = [self._numbers.pop(name) for name in names]
        for number in gone:
            del self.sizes[self.shards[number]], self.runs[self.shards[number]]
        if gone:
            self._keep(lambda table: ~np.isin(table.shard, np.array(gone, np.uint32)))

    def drop_copy(self, copy: EntryCopy) -> None:
        """Forget a damaged copy, so that it is no longer counted, found or read."""
        number = self._numbers.get(copy.shard, -1)
        self._keep(lambda table: ~((table.shard == number) & (table.start == np.uint64(copy.start))))

    def _keep(self, chosen: Callable[[EntryTable], NDArray[np.bool_]]) -> None:
        kept = [table.rows(chosen(table)) for table in self._tables]
        self._tables = [table for table in kept if len(table)]

    def copies(self, key: Key) -> list[EntryCopy]:
        high, low = int(key[:16], 16), int(key[16:], 16)
        return [self._copy_at(table, row) for table in self._tables for row in table.copies(high, low)]

    def _copy_at(self, table: EntryTable, row: int) -> EntryCopy:
        layout = self.layouts[int(table.layout[row])]
        return EntryCopy(self.shards[int(table.shard[row])], layout, int(table.start[row]), int(table.checksum[row]))

    def present(self, keys: Sequence[Key]) -> NDArray[np.bool_]:
        high, low = split_keys(keys)
        found = np.zeros(len(keys), np.bool_)
        for table in self._tables:
            found |= table.find(high, low) >= 0
        return found

    def rows(self, keys: Sequence[Key]) -> tuple[EntryTable, NDArray[np.bool_]]:
        """One copy of each key that is present, and a mask over `keys` of those that are."""
        high, low = split_keys(keys)
        order = by_key(high, low)  # sorted queries access each table from start to end, which caches well
        high, low = high[order], low[order]
        pending, parts = np.arange(len(keys)), []
        for table in self._tables:
            rows = table.find(high[pending], low[pending])
            present = rows >= 0
            parts.append(table.rows(rows[present]))
            pending = pending[~present]
        found = np.ones(len(keys), np.bool_)
        found[order[pending]] = False
        return merge(parts), found

    def keys(self) -> list[Key]:
        """All distinct keys, sorted."""
        if not self._tables:
            return []
        keys = join_keys(self._merged())
        return [key for at, key in enumerate(keys) if at == 0 or keys[at - 1] != key]

    def counts(self) -> Mapping[str, int]:
        """The number of entries of each shard."""
        counted = np.zeros(len(self.shards), np.int64)
        for table in self._tables:
            counted += np.bincount(table.shard, minlength=len(self.shards))
        return {name: int(counted[number]) for name, number in self._numbers.items()}

    def _merged(self) -> EntryTable:
        if len(self._tables) > 1:
            self._tables = [merge(self._tables)]
        return self._tables[0] if self._tables else empty_table()

    # -- the index file

    def write_index(self, path: Path) -> None:
        """Write a safetensors file: the columns of the table as tensors, everything else as JSON in the metadata."""
        columns = self._merged().columns()
        # Removed shards leave gaps in the numbers. The file numbers the remaining ones from 0.
        alive = [number for number, name in enumerate(self.shards) if self._numbers.get(name) == number]
        renumbered = np.zeros(len(self.shards), np.uint32)
        renumbered[alive] = np.arange(len(alive), dtype=np.uint32)
        columns["shard"] = renumbered[columns["shard"]]
        rows = len(columns["high"])
        runs = [self.runs[self.shards[number]] for number in alive]
        for one in fields(Runs):
            columns[f"run_{one.name}"] = np.concatenate([_EMPTY, *(some.__dict__[one.name] for some in runs)])
        raws = [np.ascontiguousarray(column).view(np.uint8) for column in columns.values()]
        digest = xxhash.xxh3_128()
        tensors, end = {}, 0
        for (name, column), raw in zip(columns.items(), raws, strict=True):
            digest.update(raw.data)
            begin, end = end, end + len(raw)
            tensors[name] = {"dtype": _DTYPES[column.dtype], "shape": [len(column)], "data_offsets": [begin, end]}
        metadata = {
            "format": INDEX_FORMAT,
            "data": digest.hexdigest(),
            "shards": json.dumps([[self.shards[number], self.sizes[self.shards[number]]] for number in alive]),
            "layouts": json.dumps([layout_as_json(layout) for layout in self.layouts]),
            "runs": json.dumps([len(some.start) for some in runs]),
            "rows": str(rows),
        }
        header, _ = pack_header(metadata, tensors)
        write_file(path, [memoryview(header), *(raw.data for raw in raws)])

    @classmethod
    def from_index(cls, path: Path) -> Catalogue:
        """Read the index file. DamagedFileError: the content is not what was written. OSError: it is unreadable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            metadata, data_start = read_header(descriptor)
            if metadata.get("format") != INDEX_FORMAT:
                raise DamagedFileError(f"its format is {metadata.get('format')!r}")
            data = np.empty(os.fstat(descriptor).st_size - data_start, np.uint8)
            read_fully(descriptor, data.data, data_start)
        finally:
            os.close(descriptor)
        if xxhash.xxh3_128_hexdigest(data.data) != metadata["data"]:
            raise DamagedFileError("its data does not match its checksum")
        return cls._unpacked(metadata, data)

    @classmethod
    def _unpacked(cls, metadata: Mapping[str, str], data: NDArray[np.uint8]) -> Catalogue:
        self = cls()
        rows, counts = int(metadata["rows"]), json.loads(metadata["runs"])
        kinds = [(column.dtype, rows) for column in empty_table().columns().values()]
        kinds += [(_EMPTY.dtype, sum(counts))] * len(fields(Runs))
        columns, begin = [], 0
        for kind, length in kinds:
            end = begin + length * kind.itemsize
            columns.append(data[begin:end].view(kind))
            begin = end
        own, first = len(fields(EntryTable)), 0
        for (name, size), count in zip(json.loads(metadata["shards"]), counts, strict=True):
            self._number(name, size)
            self.runs[name] = Runs(*(column[first : first + count] for column in columns[own:]))
            first += count
        for one in json.loads(metadata["layouts"]):
            self._layout_number(layout_from_json(one))
        self._tables = [EntryTable(*columns[:own])] if rows else []
        return self
