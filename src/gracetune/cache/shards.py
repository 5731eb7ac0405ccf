"""The shard format: an immutable, self-describing safetensors file of complete entries.

The data section holds one entry after the other. Each entry starts at a multiple of 64 bytes of the file. The tensors
of an entry are called `<key>/<name>` and are contiguous, in descending order of element size, so each one is aligned.
`<key>/.padding` fills the entry up to the next multiple of 64 bytes. The `__metadata__` of the header:

    checksum   xxh3-128 of the header (including its length), computed with zeros in place of this checksum
    format     "gracetune-cache-shard 1"
    layouts    JSON: every distinct layout, as a list of [name, dtype, shape, offset in the entry, size]
    parts      JSON: every distinct part of an origin, as [name, value]
    entries    JSON: [key, offset in the data, layout number, xxh3-64 of the entry's bytes, kind, source, part numbers,
               note]; the note is a text for users, empty for entries that gracetune encoded
    runs       JSON: [number of entries, xxh3-64 of their bytes] for consecutive runs of about 1 MiB; a reader of a
               complete run verifies one checksum instead of one per entry

A reader uses only data whose checksum matches: a wrong byte anywhere causes an error, never a wrong tensor.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from gracetune.cache.keys import EntryOrigin, Key
from gracetune.storage import safetensors_headers
from gracetune.storage.atomic import write_file
from gracetune.storage.safetensors_headers import MAX_HEADER, describe, read_fully
from gracetune.units import MIB

if TYPE_CHECKING:
    from torch import Tensor

    from gracetune.cache.encoder import Entry

ALIGNMENT = 64
RUN = 1 * MIB
"""Bytes. Large enough for an efficient system call, small enough to be hashed while it is in the CPU's cache."""
SHARD_FORMAT = "gracetune-cache-shard 1"
_PADDING = ".padding"
# `__metadata__` and its checksum are the first keys, so the checksum has a fixed place.
_BEFORE = b'{"__metadata__":'
_START = _BEFORE + b'{"checksum":"'
_BLANK = "0" * 32
_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")


class DamagedFileError(Exception):
    """A file whose content is not what was written. Internal: the store skips such a file and lists it as damaged."""


class OtherFormatError(DamagedFileError):
    """An intact file in a format that this release does not read. It must not be removed."""


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: str
    """In the spelling of safetensors: "BF16"."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the entry; a multiple of the element size."""
    size: int
    """In bytes."""


@dataclass(frozen=True)
class EntryLayout:
    """The tensors of an entry and their offsets. Entries of one bucket usually share one layout."""

    tensors: tuple[TensorSpec, ...]
    size: int
    """Bytes of the whole entry, including padding; a multiple of 64."""

    def views(self, raw: Tensor) -> Entry:
        """The tensors of an entry as views of `raw`: its `size` bytes, uint8, on any device, aligned to 64 bytes."""
        from gracetune.storage.safetensors_files import TORCH_DTYPES

        return {
            one.name: raw[one.offset : one.offset + one.size].view(TORCH_DTYPES[one.dtype]).reshape(one.shape)
            for one in self.tensors
        }


@dataclass(frozen=True)
class Packed:
    """An entry, serialized."""

    key: Key
    origin: EntryOrigin
    layout: EntryLayout
    raw: NDArray[np.uint8]
    checksum: int
    note: str = ""


@dataclass(frozen=True)
class StoredEntry:
    """One entry of a shard, as its header describes it."""

    key: Key
    origin: EntryOrigin
    layout: EntryLayout
    start: int
    """Bytes from the start of the file."""
    checksum: int
    note: str = ""
    """The source of an imported entry; empty for entries that gracetune encoded."""


@dataclass(frozen=True, eq=False)
class Shard:
    """A verified shard header. `entries` creates the origins lazily, because a million of them take long."""

    name: str
    size: int
    """Bytes of the file."""
    data_start: int
    """Bytes before the data: the header with its length."""
    layouts: tuple[EntryLayout, ...]
    parts: tuple[tuple[str, str], ...]
    rows: Sequence[Sequence[Any]]
    """The header's `entries`."""
    runs: Sequence[tuple[int, str]]
    """The header's `runs`."""

    @property
    def keys(self) -> list[Key]:
        return [row[0] for row in self.rows]

    def entries(self) -> Iterator[StoredEntry]:
        for key, offset, layout, digest, kind, source, numbers, note in self.rows:
            origin = EntryOrigin(kind, source, tuple([self.parts[number] for number in numbers]))
            start = self.data_start + offset
            yield StoredEntry(key, origin, self.layouts[layout], start, int(digest, 16), note)


def is_shard(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def pack(key: Key, origin: EntryOrigin, entry: Entry, note: str = "") -> Packed:
    """Serialize an entry. `key` must be `origin.key`. The tensors are copied, so the caller may reuse them."""
    import torch

    if not entry:
        raise ValueError("an entry without tensors")
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in entry.items()}
    layout = _layout(on_cpu)
    raw = np.zeros(layout.size, np.uint8)
    for one in layout.tensors:
        raw[one.offset : one.offset + one.size] = on_cpu[one.name].reshape(-1).view(torch.uint8).numpy()
    return Packed(key, origin, layout, raw, checksum(raw.data), note)


def checksum(raw: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(raw)


def _layout(entry: Mapping[str, Tensor]) -> EntryLayout:
    from gracetune.storage.safetensors_files import DTYPE_NAMES

    specs: list[TensorSpec] = []
    end = 0
    for name, tensor in sorted(entry.items(), key=lambda item: (-item[1].element_size(), item[0])):
        if name == _PADDING or tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"a cache cannot store a tensor called {name!r} of {tensor.dtype}")
        size = tensor.numel() * tensor.element_size()
        specs.append(TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), end, size))
        end += size
    return EntryLayout(tuple(specs), max(1, -(-end // ALIGNMENT)) * ALIGNMENT)


# -- writing ----------------------------------------------------------------------------------------------------------


def write_shard(folder: Path, entries: Sequence[Packed]) -> Shard:
    """Write a new shard. It is durable when this function returns. An OSError leaves no file behind."""
    name = f"{secrets.token_hex(16)}.safetensors"
    layouts: dict[EntryLayout, int] = {}
    parts: dict[tuple[str, str], int] = {}
    rows: list[list[Any]] = []
    tensors: dict[str, Any] = {}
    end = 0
    for entry in entries:
        origin = entry.origin
        numbers = [parts.setdefault(part, len(parts)) for part in origin.parts]
        layout = layouts.setdefault(entry.layout, len(layouts))
        rows.append([entry.key, end, layout, f"{entry.checksum:016x}", origin.kind, origin.source, numbers, entry.note])
        _describe(entry, end, tensors)
        end += entry.layout.size
    metadata = {
        "format": SHARD_FORMAT,
        "layouts": _json([layout_as_json(one) for one in layouts]),
        "parts": _json([*parts]),
        "entries": _json(rows),
        "runs": _json(runs := _runs(entries)),
    }
    header, data_start = pack_header(metadata, tensors)
    write_file(folder / name, [memoryview(header), *(entry.raw.data for entry in entries)])
    return Shard(name, data_start + end, data_start, tuple(layouts), tuple(parts), rows, runs)


def _runs(entries: Sequence[Packed]) -> list[tuple[int, str]]:
    runs = []
    count, size, digest = 0, 0, xxhash.xxh3_64()
    for number, entry in enumerate(entries):
        count, size = count + 1, size + entry.layout.size
        digest.update(entry.raw.data)
        if size >= RUN or number == len(entries) - 1:
            runs.append((count, digest.hexdigest()))
            count, size, digest = 0, 0, xxhash.xxh3_64()
    return runs


def layout_as_json(layout: EntryLayout) -> list[Any]:
    return [[one.name, one.dtype, one.shape, one.offset, one.size] for one in layout.tensors]


def layout_from_json(value: Sequence[Any]) -> EntryLayout:
    tensors = tuple(TensorSpec(name, dtype, tuple(shape), offset, size) for name, dtype, shape, offset, size in value)
    end = tensors[-1].offset + tensors[-1].size
    return EntryLayout(tensors, max(1, -(-end // ALIGNMENT)) * ALIGNMENT)


def _describe(entry: Packed, start: int, tensors: dict[str, Any]) -> None:
    """Add the header items of one entry, in the order of the data."""
    end = start
    for one in entry.layout.tensors:
        begin, end = start + one.offset, start + one.offset + one.size
        tensors[f"{entry.key}/{one.name}"] = describe(one.dtype, one.shape, begin, end)
    last = start + entry.layout.size
    if end < last:
        tensors[f"{entry.key}/{_PADDING}"] = describe("U8", (last - end,), end, last)


def pack_header(metadata: Mapping[str, str], tensors: Mapping[str, Any]) -> tuple[bytes, int]:
    """A safetensors header with a checksum of itself, and the offset of the data, which is a multiple of 64."""
    raw = safetensors_headers.pack_header(
        tensors, {"checksum": _BLANK, **metadata}, alignment=ALIGNMENT, ascii_only=True
    )
    at = 8 + len(_START)  # the header begins with its length in eight bytes
    return raw[:at] + xxhash.xxh3_128_hexdigest(raw).encode() + raw[at + 32 :], len(raw)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_shard(path: Path) -> Shard:
    """Read and verify the header. DamagedFileError: header or length is wrong. OSError: the file is unreadable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        metadata, data_start = read_header(descriptor)
    finally:
        os.close(descriptor)
    if metadata.get("format") != SHARD_FORMAT:
        raise OtherFormatError(f"its format is {metadata.get('format')!r}, not {SHARD_FORMAT!r}")
    layouts = tuple(layout_from_json(one) for one in json.loads(metadata["layouts"]))
    parts = tuple((part, value) for part, value in json.loads(metadata["parts"]))
    rows, runs = json.loads(metadata["entries"]), json.loads(metadata["runs"])
    expected = data_start + max((row[1] + layouts[row[2]].size for row in rows), default=0)
    if size != expected:
        raise DamagedFileError(f"its size is {size:,} bytes instead of {expected:,}")
    return Shard(path.name, size, data_start, layouts, parts, rows, runs)


def read_header(descriptor: int) -> tuple[dict[str, str], int]:
    """The verified metadata of a header made by `pack_header`, and the offset of the data."""
    first = bytearray(8)
    got = read_fully(descriptor, memoryview(first), 0)
    length = int.from_bytes(first, "little")
    if got < 8 or not len(_START) + 32 <= length <= MAX_HEADER:
        raise DamagedFileError("it does not start with a plausible header length")
    text = bytearray(min(length, os.fstat(descriptor).st_size))
    if read_fully(descriptor, memoryview(text), 8) < length:
        raise DamagedFileError("it ends inside its header")
    checksum_at = slice(len(_START), len(_START) + 32)
    found = bytes(text[checksum_at])
    text[checksum_at] = _BLANK.encode()
    if not text.startswith(_START) or xxhash.xxh3_128_hexdigest(bytes(first) + text).encode() != found:
        raise DamagedFileError("its header does not match its checksum")
    # Parse `__metadata__` only. The items of the tensors repeat it, and parsing them takes three times as long.
    metadata, _ = json.JSONDecoder().raw_decode(text.decode(), len(_BEFORE))
    return metadata, 8 + length
