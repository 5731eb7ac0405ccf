"""Safetensors headers: parse and check them without reading the tensor data.

A safetensors file has three parts:

    8 bytes   the header's length in bytes, little-endian
    header    JSON: `name -> {dtype, shape, data_offsets: [begin, end]}`, offsets counted from the end of the header,
              and optionally `__metadata__: {text: text}`
    data      the tensors' bytes; every byte belongs to exactly one tensor

The safetensors library checks the same, but does not expose where in the file a tensor lies, which we need to read it
directly. A sharded model adds a JSON index: `weight_map: {tensor name -> file name}`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gracetune.errors import GracetuneError, Problem, short
from gracetune.storage.os_errors import problem_of
from gracetune.storage.regular_files import open_regular, read_small_file
from gracetune.units import format_bytes


class WeightFileError(GracetuneError):
    """A weight file cannot be read, or does not fit the model. Carries all problems, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        if not self.problems:
            raise ValueError("a WeightFileError needs at least one problem to report")
        super().__init__("\n".join(str(problem) for problem in self.problems))


MAX_HEADER = 100_000_000
"""The safetensors library's own limit."""
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_DOWNLOAD = "download it again, and compare its size with the one at the source"
_SHOWN = 8
"""Problems or names listed in one message."""
_TOO_LARGE = 1 << 63
_MAX_TOKENS = {b"{": 1_000_000, b"[": 1_000_000, b",": 10_000_000}
"""Limits on a header, counted before it is parsed, because parsing a hostile one would exhaust memory. The largest
known models have ten thousand tensors with about three of these characters each."""
_MAX_DIMENSIONS = 64

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class FileIdentity:
    """Identifies the file whose header was read, so that a later reader notices if it was replaced or changed."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> FileIdentity:
        found = os.fstat(descriptor)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class TensorEntry:
    name: str
    dtype: str
    """The name used in the file, such as "BF16"."""
    shape: tuple[int, ...]
    path: Path
    start: int
    """Offset in bytes from the beginning of the file."""
    size: int
    """In bytes."""


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of one file, or of all files of a sharded model."""

    entries: Mapping[str, TensorEntry]
    files: Mapping[Path, FileIdentity]
    metadata: Mapping[str, str]
    """The `__metadata__` of a single file; empty for a sharded model."""

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries.values())


def describe(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    """A tensor's entry in a header; `begin` and `end` count from the end of the header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def pack_header(
    tensors: Mapping[str, Any], metadata: Mapping[str, str], *, alignment: int = 8, ascii_only: bool = False
) -> bytes:
    """The start of a file: the header's length and the header, padded to a multiple of `alignment` bytes.

    `tensors` must be in the order of the data.
    """
    content = {_METADATA: dict(metadata), **tensors} if metadata else dict(tensors)
    text = json.dumps(content, ensure_ascii=ascii_only, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % alignment)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def open_weights(path: Path) -> WeightFiles:
    """Read the header of a `.safetensors` file, or the headers of all files a `.safetensors.index.json` names."""
    if path.is_dir():
        files = sorted(entry.name for entry in path.iterdir() if ".safetensors" in entry.name)
        contents = f"it holds {_listed(files)}" if files else "it holds no safetensors file"
        raise WeightFileError(
            [_problem(path, "path", f"a folder; {contents}", "a file", "give the path of the file itself")]
        )
    return _open_index(path) if path.suffix == ".json" else _open_file(path)


def _open_file(path: Path) -> WeightFiles:
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise WeightFileError([unreadable(path, error)]) from None
    try:
        identity = FileIdentity.of(descriptor)
        header, data_start = _read_header(path, descriptor, identity.size)
    except OSError as error:
        raise WeightFileError([unreadable(path, error)]) from None
    finally:
        os.close(descriptor)
    metadata = _metadata(path, header.pop(_METADATA, None))
    entries = _entries(path, header, data_start)
    _check_coverage(path, entries, data_start, identity.size)
    return WeightFiles({entry.name: entry for entry in entries}, {path: identity}, metadata)


def unreadable(path: Path, error: OSError) -> Problem:
    """The problem to report for a weight file that the operating system cannot read."""
    return problem_of(error, "path", path, access="read", then="")


def _read_header(path: Path, descriptor: int, size: int) -> tuple[dict[str, Any], int]:
    """The header, and the offset of the data in the file. `size` is the file's size in bytes."""
    first = bytearray(_LENGTH_BYTES)
    got = read_fully(descriptor, memoryview(first), 0)
    if first == b"version ":  # the start of a Git LFS pointer file
        raise WeightFileError([_problem(path, "header", "a Git LFS pointer", "the file it points to", "git lfs pull")])
    length = int.from_bytes(first, "little")
    if got < _LENGTH_BYTES or not 2 <= length <= MAX_HEADER:
        found = f"{format_bytes(size)} that do not begin with a header length"
        raise WeightFileError([_problem(path, "header", found, "a safetensors file", _DOWNLOAD)])
    data_start = _LENGTH_BYTES + length
    raw = bytearray(min(length, size))
    if read_fully(descriptor, memoryview(raw), _LENGTH_BYTES) < length:
        expected = f"at least {data_start:,} bytes, where the header ends"
        raise WeightFileError([_problem(path, "header", f"the file ends after {size:,} bytes", expected, _DOWNLOAD)])
    for part, most in _MAX_TOKENS.items():
        if raw.count(part) > most:
            found = f"{raw.count(part):,} '{part.decode()}' characters in {format_bytes(length)}"
            raise WeightFileError([_problem(path, "header", found, f"at most {most:,}", _DOWNLOAD)])
    return _parse_json(path, "header", bytes(raw)), data_start


def read_fully(descriptor: int, into: memoryview, offset: int) -> int:
    """Fill `into` from the file at `offset`. Returns the bytes read: fewer than its length only at the end of the file.

    A single `preadv` may return less than requested, for example more than 2 GiB at once, hence the loop.
    """
    done = 0
    while done < len(into):
        got = os.preadv(descriptor, [into[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done


def _parse_json(path: Path, key: str, raw: bytes) -> dict[str, Any]:
    try:
        # RecursionError: brackets nested deeper than in any real header.
        parsed = json.loads(raw.decode(), object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise WeightFileError([_problem(path, key, f"invalid JSON: {error}", "JSON", _DOWNLOAD)]) from None
    if not isinstance(parsed, dict):
        raise WeightFileError([_problem(path, key, f"a {type(parsed).__name__}", "a JSON object", _DOWNLOAD)])
    return parsed


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {short(twice)} appears twice")
    for name in found:
        name.encode()  # rejects lone surrogates: UnicodeEncodeError is a ValueError
    return found


def _reject_constant(text: str) -> None:
    """`json` accepts NaN and Infinity, which the JSON standard does not have."""
    raise ValueError(f"{text} is not JSON")


def _metadata(path: Path, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        found = _short(value)
        raise WeightFileError([_problem(path, _METADATA, found, "an object whose values are text", _DOWNLOAD)])
    return value


def _entries(path: Path, header: Mapping[str, Any], data_start: int) -> list[TensorEntry]:
    entries, problems = [], []
    for name, value in header.items():
        found = _entry(path, name, value, data_start)
        if isinstance(found, TensorEntry):
            entries.append(found)
        else:
            problems.append(found)
    if problems:
        raise WeightFileError(shortened(problems))
    return sorted(entries, key=lambda entry: (entry.start, entry.size))


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry | Problem:
    def problem(found: str, expected: str) -> Problem:
        return _problem(path, name, found, expected, _DOWNLOAD)

    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        return problem(_short(value), "dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        return problem(f"dtype {_short(dtype)}", f"one of {', '.join(BITS)}")
    if not _is_list_of_whole_numbers(shape) or len(shape) > _MAX_DIMENSIONS:
        return problem(f"shape {_short(shape)}", f"a list of at most {_MAX_DIMENSIONS} whole numbers")
    if not _is_list_of_whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return problem(f"data_offsets {_short(offsets)}", "[begin, end]")
    bits = _bits(dtype, shape)
    if bits is None or offsets[1] >= _TOO_LARGE:
        return problem(f"shape {_short(shape)} at {_short(offsets)}", "a tensor that fits a 64-bit machine")
    size = offsets[1] - offsets[0]
    if bits != size * 8:
        return problem(f"{size:,} bytes", f"{bits / 8:,.10g} bytes for {dtype} {_short(shape)}")
    return TensorEntry(name, dtype, tuple(shape), path, data_start + offsets[0], size)


def _bits(dtype: str, shape: list[int]) -> int | None:
    """The tensor's size in bits, or None if no machine could hold it.

    A dimension of 0 counts as 1 for the limit, so that it does not hide absurd values in the others.
    """
    bits = BITS[dtype]
    for length in shape:
        bits *= length or 1
        if bits >= _TOO_LARGE:
            return None
    return 0 if 0 in shape else bits


def _is_list_of_whole_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_coverage(path: Path, entries: list[TensorEntry], data_start: int, file_size: int) -> None:
    """Check that each tensor begins where the previous one ends, and that the last one ends with the file."""
    end, problems = data_start, []
    for entry in entries:
        if entry.start != end:
            distance = abs(entry.start - end)
            what = "shares {:,} bytes with" if entry.start < end else "begins {:,} bytes after the end of"
            found = f"it {what.format(distance)} the tensor before it"
            problems.append(_problem(path, entry.name, found, "tensors without gaps or overlaps", _DOWNLOAD))
        end = max(end, entry.start + entry.size)
    if end != file_size:
        found = f"a file of {file_size:,} bytes" + ("" if file_size > end else ": it is truncated")
        problems.append(_problem(path, "data", found, f"{end:,} bytes, as its header says", _DOWNLOAD))
    if problems:
        raise WeightFileError(shortened(problems))


def _open_index(path: Path) -> WeightFiles:
    try:
        raw = read_small_file(path)
    except OSError as error:
        raise WeightFileError([unreadable(path, error)]) from None
    weight_map = _parse_json(path, "index", raw).get("weight_map")
    if not isinstance(weight_map, dict) or not all(_is_file_name(name) for name in weight_map.values()):
        expected = "an object: tensor name -> name of a file beside the index"
        raise WeightFileError([_problem(path, "weight_map", _short(weight_map), expected, _DOWNLOAD)])
    shards: dict[str, WeightFiles] = {}
    damaged: list[Sequence[Problem]] = []
    """The problems of each damaged file, already shortened."""
    for name in sorted(set(weight_map.values())):
        try:
            shards[name] = _open_file(path.parent / name)
        except WeightFileError as error:
            damaged.append(error.problems)
    if damaged:
        shown: list[Problem] = []
        while damaged and len(shown) < _SHOWN:
            shown += damaged.pop(0)
        if damaged:
            found = f"{len(damaged):,} more files with problems"
            shown.append(Problem("...", found, shown[-1].expected, shown[-1].hint, str(path)))
        raise WeightFileError(shown)
    problems = _index_mismatches(path, weight_map, shards)
    if problems:
        raise WeightFileError(shortened(problems))
    return WeightFiles(
        entries={name: shards[shard].entries[name] for name, shard in weight_map.items()},
        files={file: identity for shard in shards.values() for file, identity in shard.files.items()},
        metadata={},
    )


def _is_file_name(value: object) -> bool:
    """Whether the value is a plain file name. A path could lead out of the index's folder."""
    return isinstance(value, str) and value not in ("", ".", "..") and not set(value) & {"/", "\\", "\0"}


def _index_mismatches(path: Path, weight_map: Mapping[str, str], shards: Mapping[str, WeightFiles]) -> list[Problem]:
    hint = "download the index and its files again, all of the same revision"
    missing = [name for name, shard in weight_map.items() if name not in shards[shard].entries]
    problems = [
        _problem(path, name, f"not in {short(weight_map[name])}", "in the file the index names for it", hint)
        for name in missing
    ]
    for shard, weights in shards.items():
        unlisted = [name for name in weights.entries if weight_map.get(name) != shard]
        problems += [
            _problem(path, name, f"in {shard}, where the index does not look for it", "listed there", hint)
            for name in unlisted
        ]
    return problems


def shortened(problems: list[Problem]) -> list[Problem]:
    """The first problems and a count of the rest: a damaged file usually has thousands of the same kind."""
    if len(problems) <= _SHOWN:
        return problems
    last = problems[_SHOWN]
    rest = len(problems) - _SHOWN
    more = Problem("...", f"{rest:,} more problems of this kind", last.expected, last.hint, last.file)
    return [*problems[:_SHOWN], more]


def _problem(path: Path, key: str, found: str, expected: str, hint: str) -> Problem:
    return Problem(key, found, expected, hint, str(path))


def _short(value: object) -> str:
    return short(repr(value), 80)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else "")
