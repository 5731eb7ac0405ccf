"""The format of a checkpoint, version 1.

A folder `checkpoint-<step>` of plain files:

    manifest.json                                see below
    <part>.json                                  the JSON of a state part that all ranks share
    <part>.safetensors                           its tensors, if it has any
    <part>.rank-<5 digits>.json, .safetensors    the same for a state part that each rank saves separately

The keys of `manifest.json`: `format` ("gracetune-checkpoint"), `version` (1), `step` (optimizer steps done), `created`
(ISO 8601, UTC), `world_size`, `identity` (names and values that identify the run), `config_digest`, `data` (fingerprint
of the data), `versions` (of libraries), `pieces` and `per_rank_pieces` (names of the state parts), `files` (name ->
`size` and `checksum`, an xxh3-128), and `checksum`: the xxh3-128 of all other keys as JSON with sorted keys and without
spaces.

Writing is atomic: the folder is created under a temporary name, its files and then the folder itself are synced, it is
renamed, and the parent folder is synced.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from gracetune.storage.atomic import write_new
from gracetune.storage.regular_files import open_regular, read_small_file
from gracetune.units import MIB

FORMAT = "gracetune-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
PART = "part "
"""Prefix of identity names for single parts of a model. Checkpoints of earlier releases have no such names."""
_UNSET = object()
_FOLDER = re.compile(r"checkpoint-(0|[1-9][0-9]*)")


class BadManifestError(Exception):
    """A manifest is not usable. Internal to this package, which turns it into an error with a remedy."""


class OtherManifestError(BadManifestError):
    """A release with another format wrote the manifest."""


@dataclass(frozen=True)
class Metadata:
    """The part of a manifest that the run provides."""

    identity: Mapping[str, str]
    """Identifies the run: its name, model, adapter and more. A checkpoint with another identity is rejected."""
    config_digest: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of `manifest.json`, without the constants."""

    step: int
    created: str
    world_size: int
    metadata: Metadata
    parts: tuple[str, ...]
    per_rank_parts: tuple[str, ...]
    files: Mapping[str, Fact]

    def as_bytes(self) -> bytes:
        body = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "created": self.created,
            "world_size": self.world_size,
            **asdict(self.metadata),
            "pieces": self.parts,
            "per_rank_pieces": self.per_rank_parts,
            "files": {name: asdict(fact) for name, fact in self.files.items()},
        }
        return (json.dumps({**body, "checksum": _checksum(body)}, indent=1, ensure_ascii=False) + "\n").encode()


def folder_name(step: int) -> str:
    return f"checkpoint-{step}"


def step_of(name: str) -> int | None:
    """The step in a folder name, or None if it is not the name of a checkpoint."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def file_stem(part: str, rank: int | None) -> str:
    return part if rank is None else f"{part}.rank-{rank:05d}"


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read and verify a manifest. BadManifestError: invalid content. OSError: unreadable."""
    try:
        value = json.loads(read_small_file(folder / MANIFEST))
    except FileNotFoundError:
        raise BadManifestError("it is missing") from None
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8
        raise BadManifestError(f"it is not valid JSON: {error}") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise BadManifestError(f"its format is not {FORMAT!r}")
    version = value.get("version")
    if version != VERSION or isinstance(version, bool):
        newer = isinstance(version, int) and version > VERSION
        raise OtherManifestError(f"format version {version}{', written by a newer release' if newer else ''}")
    found = value.pop("checksum", None)
    if found != _checksum(value):
        raise BadManifestError("its content does not match its checksum")
    return _from_json(value)


def _from_json(value: Mapping[str, Any]) -> CheckpointManifest:
    # The checksum is correct, so the content is what was written and has all keys of this version.
    return CheckpointManifest(
        step=value["step"],
        created=value["created"],
        world_size=value["world_size"],
        metadata=Metadata(value["identity"], value["config_digest"], value["data"], value["versions"]),
        parts=tuple(value["pieces"]),
        per_rank_parts=tuple(value["per_rank_pieces"]),
        files={name: Fact(**fact) for name, fact in value["files"].items()},
    )


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return xxhash.xxh3_128_hexdigest(text.encode())


def identity_differences(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """One line per difference. Values that are JSON objects are compared key by key.

    If `before` contains no parts of the model, they are unknown and not compared; see `has_unknown_parts`.
    """
    names = [*before, *(name for name in now if name not in before)]
    if has_unknown_parts(before, now):
        names = [name for name in names if not name.startswith(PART)]
    return tuple(line for name in names for line in _identity_difference(name, before.get(name), now.get(name)))


def has_unknown_parts(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether an earlier release wrote `before`, which recorded only the trained weights and no other model parts."""
    return any(name.startswith(PART) for name in now) and not any(name.startswith(PART) for name in before)


def _identity_difference(name: str, before: str | None, now: str | None) -> Iterator[str]:
    if before == now:
        return
    old, new = _object(before), _object(now)
    if old is None or new is None:
        yield f"{name} was {_value_text(before)} and is {_value_text(now)}"
        return
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key, _UNSET) != new.get(key, _UNSET):
            yield f"{name}: {key} was {_item_text(old, key)} and is {_item_text(new, key)}"


def _object(text: str | None) -> dict[str, Any] | None:
    """The JSON object in a text; None for any other text."""
    try:
        found = json.loads(text or "")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _value_text(value: str | None) -> str:
    return "not set" if value is None else repr(value)


def _item_text(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "not set"


# -- files and their checksums -----------------------------------------------------------------------------------------


_CHUNK = 16 * MIB


@dataclass(frozen=True)
class Fact:
    """The recorded size and checksum of a file."""

    size: int
    checksum: str
    """xxh3-128 of the whole content, in hexadecimal."""


def write_checksummed(path: Path, parts: Iterable[memoryview]) -> Fact:
    """Create a file, flush it and return its size and checksum. Every OSError raised carries the path."""
    digest, size = xxhash.xxh3_128(), 0

    def hashed_chunks() -> Iterator[memoryview]:
        nonlocal size
        for part in parts:
            for begin in range(0, len(part), _CHUNK):
                chunk = part[begin : begin + _CHUNK]
                digest.update(chunk)
                size += len(chunk)
                yield chunk

    write_new(path, hashed_chunks())
    return Fact(size, digest.hexdigest())


def difference(path: Path, expected: Fact) -> str | None:
    """Describe how the file differs from `expected`, or return None. Raises OSError if the file cannot be read."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "it is missing"
    if size != expected.size:
        return f"{size:,} bytes instead of {expected.size:,}"
    digest = xxhash.xxh3_128()
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return None if digest.hexdigest() == expected.checksum else "its bytes do not match their checksum"
