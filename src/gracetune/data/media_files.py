"""Examining one media file: its properties and the digest of its content, or the reason why it is unreadable."""

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
from gracetune.data.media.truncated import truncation
from gracetune.units import MIB

READ_FIRST: Final = 32 * MIB
"""Images up to this size are read whole at once. Of larger ones the header is read first, because it may show that the
image has too many pixels."""
_CHUNK: Final = 1 << 20

Facts = ImageFacts | VideoFacts | AudioFacts
_FACTS: Final[dict[Kind, type[Facts]]] = {"image": ImageFacts, "video": VideoFacts, "audio": AudioFacts}
_TYPES: Final = {"int": (int,), "float": (float, int), "bool": (bool,)}
"""JSON types accepted for an annotated field. A float without a fraction may be written as an integer."""


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A readable media file. Damage in its middle shows only when it is decoded."""

    path: str
    size: int
    """In bytes."""
    digest: str
    """xxh3-128 of the content, in hexadecimal."""
    facts: Facts


@runtime_checkable
class Digesting(Protocol):
    """A backend that already knows the digests of its files, such as staged data."""

    def digest(self, path: str) -> str | None: ...


def examine(backend: Backend, path: str, kind: Kind, size: int) -> MediaFile | str:
    """Read a file and return its properties and digest, or the reason why it is unreadable."""
    try:
        return _examine_image(backend, path, size) if kind == "image" else _examine_stream(backend, path, kind, size)
    except UnreadableMediaError as error:
        return error.reason
    except MissingFileError:
        return "it was removed before it could be read"


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
    """Whether a class of backends knows digests. Cached, because a protocol check takes as long as hashing a file."""
    return hasattr(kind, "digest")


def _streamed_digest(backend: Backend, path: str) -> str:
    """The digest of a file read in chunks: a video may be too large to hold in memory."""
    digest = xxhash.xxh3_128()
    with backend.open(path) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def facts_as_json(facts: Facts) -> dict[str, Any]:
    return {one.name: getattr(facts, one.name) for one in fields(facts)}


def facts_from_json(kind: Kind, values: Mapping[str, Any]) -> Facts:
    """Build the properties of a file from JSON. Raises ValueError if the names or types do not match."""
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
    """Equal properties share one object, which leaves the garbage collector fewer objects to traverse."""
    return _FACTS[kind](*values)
