"""The format of a checkpoint, version 1.

A folder `checkpoint-<step>` of plain files:

    manifest.json                          what follows, and the size and xxh3-128 of every other file
    <piece>.json                           the JSON of a shared piece
    <piece>.safetensors                    its tensors, where it has any
    <piece>.rank-<5 digits>.json, .safetensors   the same of a piece each process has for itself

`manifest.json`: `format` ("gracetune-checkpoint"), `version` (1), `step` (optimizer steps done), `created` (ISO 8601,
UTC), `world_size`, `identity` (what makes the run this run: names and values), `config_digest`, `data` (the data's
fingerprint), `versions` (of the libraries), `pieces` and `per_rank_pieces` (names), `files` (name -> `size`,
`checksum`), and `checksum`: the xxh3-128 of the rest as JSON with sorted keys and no spaces.

The folder is made under another name, every file in it synced, then itself, then renamed, then the folder above
synced: it is there whole or not at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from gracetune.storage.checksums import Fact
from gracetune.storage.regular_files import read_small_file

FORMAT = "gracetune-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
PART = "part "
"""How names of an identity begin that are about one part of a model; checkpoints of earlier releases have none."""
_UNSET = object()
_FOLDER = re.compile(r"checkpoint-(0|[1-9][0-9]*)")


class BadManifestError(Exception):
    """Why a manifest cannot be used. Stays inside this package, which knows what to type."""


class NewerFormatError(BadManifestError):
    """A manifest of a release newer than this one."""


@dataclass(frozen=True)
class Metadata:
    """What only the run knows about its checkpoints."""

    identity: Mapping[str, str]
    """What makes the run this run, such as its name, model and adapter: a checkpoint that differs is refused."""
    config_digest: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    step: int
    created: str
    world_size: int
    metadata: Metadata
    pieces: tuple[str, ...]
    per_rank_pieces: tuple[str, ...]
    files: Mapping[str, Fact]

    def as_bytes(self) -> bytes:
        body = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "created": self.created,
            "world_size": self.world_size,
            **asdict(self.metadata),
            "pieces": self.pieces,
            "per_rank_pieces": self.per_rank_pieces,
            "files": {name: asdict(fact) for name, fact in self.files.items()},
        }
        return (json.dumps({**body, "checksum": _checksum(body)}, indent=1, ensure_ascii=False) + "\n").encode()


def folder_name(step: int) -> str:
    return f"checkpoint-{step}"


def step_of(name: str) -> int | None:
    """None where it is not the name of a checkpoint."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def file_stem(piece: str, rank: int | None) -> str:
    return piece if rank is None else f"{piece}.rank-{rank:05d}"


def read_manifest(folder: Path) -> Manifest:
    """BadManifestError where it is not one of ours; OSError where it cannot be read."""
    try:
        value = json.loads(read_small_file(folder / MANIFEST))
    except FileNotFoundError:
        raise BadManifestError("it is missing") from None
    except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
        raise BadManifestError(f"it is no JSON: {error}") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise BadManifestError(f"its format is not {FORMAT!r}")
    version = value.get("version")
    if isinstance(version, int) and version > VERSION:
        raise NewerFormatError(f"version {version} of the format; this release reads version {VERSION}")
    found = value.pop("checksum", None)
    if found != _checksum(value):
        raise BadManifestError("its bytes do not match their checksum")
    return _from_json(value)


def _from_json(value: Mapping[str, Any]) -> Manifest:
    # The checksum has vouched for it: what is missing here, this release never wrote.
    return Manifest(
        step=value["step"],
        created=value["created"],
        world_size=value["world_size"],
        metadata=Metadata(value["identity"], value["config_digest"], value["data"], value["versions"]),
        pieces=tuple(value["pieces"]),
        per_rank_pieces=tuple(value["per_rank_pieces"]),
        files={name: Fact(**fact) for name, fact in value["files"].items()},
    )


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return xxhash.xxh3_128_hexdigest(text.encode())


def identity_differences(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """One line for each name whose value is another, or for each value in it where both are JSON objects.

    Parts of a checkpoint that names none are unknown, which is no difference: see `has_unknown_parts`.
    """
    names = [*before, *(name for name in now if name not in before)]
    if has_unknown_parts(before, now):
        names = [name for name in names if not name.startswith(PART)]
    return tuple(line for name in names for line in _difference(name, before.get(name), now.get(name)))


def has_unknown_parts(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether `before` is of a release that recorded no parts of the model beside the trained weights."""
    return any(name.startswith(PART) for name in now) and not any(name.startswith(PART) for name in before)


def _difference(name: str, before: str | None, now: str | None) -> Iterator[str]:
    if before == now:
        return
    old, new = _object(before), _object(now)
    if old is None or new is None:
        yield f"{name} was {_said(before)} and is {_said(now)}"
        return
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key, _UNSET) != new.get(key, _UNSET):
            yield f"{name}: {key} was {_shown(old, key)} and is {_shown(new, key)}"


def _object(text: str | None) -> dict[str, Any] | None:
    try:
        found = json.loads(text or "")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _said(value: str | None) -> str:
    return "not set" if value is None else repr(value)


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "not set"
