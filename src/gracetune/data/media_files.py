"""One media file as it is: its facts and the digest of its content, or what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final, Protocol, runtime_checkable

import xxhash

from gracetune.data.backend import Backend
from gracetune.data.errors import MissingFileError, UnreadableMediaError
from gracetune.data.media import Kind
from gracetune.data.media.probe import (
    AudioFacts,
    ImageFacts,
    VideoFacts,
    image_facts,
    probe_audio,
    probe_image,
    probe_video,
)
from gracetune.data.truncation import truncation
from gracetune.units import MIB

READ_FIRST: Final = 32 * MIB
"""An image up to this size is read once, whole. A larger one may be one that its header rejects as far too large."""
_CHUNK: Final = 1 << 20

Facts = ImageFacts | VideoFacts | AudioFacts
_FACTS: Final[dict[Kind, type[Facts]]] = {"image": ImageFacts, "video": VideoFacts, "audio": AudioFacts}
_TYPES: Final = {"int": (int,), "float": (float, int), "bool": (bool,)}


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A file that can be read, as far as its beginning tells."""

    path: str
    size: int
    """Bytes."""
    digest: str
    """xxh3-128 of the content, hex."""
    facts: Facts


@runtime_checkable
class Digesting(Protocol):
    """A backend that already knows what its files' digests are: staged data."""

    def digest(self, path: str) -> str | None: ...


def examine(backend: Backend, path: str, kind: Kind, size: int) -> MediaFile | str:
    """One file, opened and read: its facts and digest, or what is wrong with it."""
    try:
        return _examine_image(backend, path, size) if kind == "image" else _examine_stream(backend, path, kind, size)
    except UnreadableMediaError as error:
        return error.reason
    except MissingFileError:
        return "it was gone before it could be read"


def _examine_image(backend: Backend, path: str, size: int) -> MediaFile | str:
    header = None if size <= READ_FIRST else probe_image(backend, path)
    data = backend.read(path)
    facts = header or image_facts(data, path)
    missing = truncation(data)
    if missing is not None:
        return missing
    return MediaFile(path, size, _known_digest(backend, path) or xxhash.xxh3_128_hexdigest(data), facts)


def _examine_stream(backend: Backend, path: str, kind: Kind, size: int) -> MediaFile:
    facts = probe_video(backend, path) if kind == "video" else probe_audio(backend, path)
    return MediaFile(path, size, _known_digest(backend, path) or _streamed_digest(backend, path), facts)


def _known_digest(backend: Backend, path: str) -> str | None:
    return backend.digest(path) if _is_digesting(type(backend)) and isinstance(backend, Digesting) else None


@lru_cache(maxsize=16)
def _is_digesting(kind: type[Backend]) -> bool:
    """Asked once for a class of backends: a check against a protocol takes as long as hashing a small file."""
    return hasattr(kind, "digest")


def _streamed_digest(backend: Backend, path: str) -> str:
    """A video may be larger than a thread should hold in memory."""
    digest = xxhash.xxh3_128()
    with backend.open(path) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def facts_as_json(facts: Facts) -> dict[str, Any]:
    return {one.name: getattr(facts, one.name) for one in fields(facts)}


def facts_from_json(kind: Kind, values: Mapping[str, Any]) -> Facts:
    """ValueError where these are not the facts of such a file."""
    names = _fields(kind)
    if values.keys() != names.keys():
        raise ValueError(f"facts of {kind}: {', '.join(values)}, expected {', '.join(names)}")
    for name, allowed in names.items():
        if type(values[name]) not in allowed:
            raise ValueError(f"{name} is {values[name]!r}")
    return _made(kind, *(values[name] for name in names))


@lru_cache(maxsize=8)
def _fields(kind: Kind) -> dict[str, tuple[type, ...]]:
    return {one.name: _TYPES[str(one.type)] for one in fields(_FACTS[kind])}


@lru_cache(maxsize=1 << 12)
def _made(kind: Kind, *values: Any) -> Facts:
    """Files of one size share their facts: fewer objects, which the garbage collector would visit again and again."""
    return _FACTS[kind](*values)
