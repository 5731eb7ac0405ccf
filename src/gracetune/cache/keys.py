"""Which entry belongs to a sample: a hash of everything that decides what the entry holds, and of nothing else.

An `Origin` lists those things part by part, as text; the key is the BLAKE2b-128 hash of that list. What a file is
called, which dataset it belongs to, its loss weight and (for latents) its caption are no parts: a renamed file keeps
its entries. Origins are stored with the entries, so that an audit can tell *which* part of a stale one differs.

Hashed is, each piece preceded by its length in bytes and a colon, so that no two lists give the same bytes:
the key version, the kind, the source, and then name and value of every part in the order of their names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal, NewType

from gracetune.cache.encoder import EncoderId
from gracetune.data.refs import Augmentation, Bucket, Clip, Fit, MaskRef, SampleRef

KEY_VERSION = 1
"""Part of every key: a later release that encodes the same parts differently raises it."""

# One for all: json.dumps would make a new one for every part of every key.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)

_NO_PICTURES = ("pictures", "[]")
_LONG = 80
"""Letters of a part; it is not kept for the next key then."""

Key = NewType("Key", str)
"""32 lower-case hexadecimal digits."""


@dataclass(frozen=True)
class Origin:
    """Everything an entry was made from and with. Equal origins, equal entries."""

    kind: Literal["latent", "text"]
    source: str
    """The digest of the file's content, or of the text."""
    parts: tuple[tuple[str, str], ...]
    """Name and value, sorted: `bucket`, `fit`, ..., `encoder.weights`, `encoder.settings.dtype`, ..."""

    @property
    def key(self) -> Key:
        pieces = [_framed(str(KEY_VERSION)), _framed(self.kind), _framed(self.source)]
        # Most parts are those of many other entries. What is long is not: it names files.
        pieces += [_known_part(part) if len(part[1]) < _LONG else _framed_part(part) for part in self.parts]
        return Key(blake2b(b"".join(pieces), digest_size=16).hexdigest())


def latent_origin(ref: SampleRef, encoder: EncoderId) -> Origin:
    if encoder.kind != "latent":
        raise ValueError(f"latents made by an encoder of kind {encoder.kind!r}")
    own = (
        ("augmentation", _augmentation_text(ref.augmentation, ref.digest)),
        ("bucket", _bucket_text(ref.bucket)),
        ("clip", "null" if ref.clip is None else _text(_clip(ref.clip))),
        ("conditioning", _text([_content(other) for other in ref.conditioning]) if ref.conditioning else "[]"),
        ("fit", "null" if ref.fit is None else _text(_fit(ref.fit))),
        ("mask", "null" if ref.mask is None else _text(_mask(ref.mask))),
        *((name, _text(value)) for name, value in _edges(ref).items()),
    )
    return Origin("latent", ref.digest, tuple(sorted((*own, *_encoder_parts(encoder)))))


def latent_key(ref: SampleRef, encoder: EncoderId) -> Key:
    return latent_origin(ref, encoder).key


def text_origin(text: str, encoder: EncoderId, pictures: Sequence[SampleRef] = ()) -> Origin:
    """`text` is the caption as the encoder gets it; `pictures` what its embedding depends on besides (edit models).

    An encoder whose `reads_pictures` is False gets none: embeddings are then shared by all samples of one caption.
    """
    if encoder.kind != "text":
        raise ValueError(f"a text embedding made by an encoder of kind {encoder.kind!r}")
    own = ("pictures", _text([_content(picture) for picture in pictures])) if pictures else _NO_PICTURES
    return Origin("text", _digest(text), _sorted_parts(own, encoder))


def text_key(text: str, encoder: EncoderId, pictures: Sequence[SampleRef] = ()) -> Key:
    return text_origin(text, encoder, pictures).key


def _digest(text: str) -> str:
    return blake2b(_framed(text), digest_size=16).hexdigest()


def _framed(piece: str) -> bytes:
    raw = piece.encode("utf-8", "surrogatepass")  # file names and captions may hold what is no Unicode
    return b"%d:%b" % (len(raw), raw)


def _framed_part(part: tuple[str, str]) -> bytes:
    return _framed(part[0]) + _framed(part[1])


_known_part = lru_cache(maxsize=1 << 13)(_framed_part)


def _text(value: Any) -> str:
    return _ENCODER.encode(value)


@lru_cache(maxsize=64)
def _sorted_parts(own: tuple[str, str], encoder: EncoderId) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((own, *_encoder_parts(encoder))))


@lru_cache(maxsize=64)
def _encoder_parts(encoder: EncoderId) -> tuple[tuple[str, str], ...]:
    settings = ((f"encoder.settings.{name}", value) for name, value in encoder.settings)
    return (("encoder.weights", encoder.weights), *settings)


def _content(ref: SampleRef) -> dict[str, Any]:
    """All that decides what `data.load(ref)` gives, as plain data."""
    return {
        "digest": ref.digest,
        "bucket": _bucket(ref.bucket),
        "fit": None if ref.fit is None else _fit(ref.fit),
        "clip": None if ref.clip is None else _clip(ref.clip),
        "augmentation": _augmentation(ref.augmentation, ref.digest),
        "mask": None if ref.mask is None else _mask(ref.mask),
        "conditioning": [_content(other) for other in ref.conditioning],
        **_edges(ref),
    }


def _edges(ref: SampleRef) -> dict[str, list[float]]:
    """A part only where there is one: keys of images as they are stay what they were."""
    return {} if ref.canny is None else {"canny": [_number(ref.canny.low), _number(ref.canny.high)]}


@lru_cache(maxsize=1 << 10)
def _bucket_text(bucket: Bucket) -> str:
    return _text(_bucket(bucket))


def _augmentation_text(augmentation: Augmentation, digest: str) -> str:
    if augmentation.seed is None or not augmentation.transforms:
        return _flips_text(augmentation.flip_x, augmentation.flip_y)
    return _text(_augmentation(augmentation, digest))


@lru_cache(maxsize=4)
def _flips_text(flip_x: bool, flip_y: bool) -> str:
    return _text(_augmentation(Augmentation(flip_x, flip_y), ""))


def _bucket(bucket: Bucket) -> list[int]:
    return [bucket.width, bucket.height, bucket.frames, bucket.audio_samples, bucket.audio_channels]


def _fit(fit: Fit) -> list[int]:
    return [*fit.original, *fit.resized, fit.left, fit.top]


def _clip(clip: Clip) -> list[Any]:
    fps = None if clip.fps is None else _number(clip.fps)
    own = [_number(clip.start), _number(clip.duration), fps, clip.spread, clip.sample_rate, clip.pad]
    return own if clip.numbers is None else [*own, list(clip.numbers)]


def _mask(mask: MaskRef) -> list[Any]:
    return [mask.digest, mask.from_alpha, _number(mask.min_weight), mask.invert]


def _augmentation(augmentation: Augmentation, digest: str) -> dict[str, Any]:
    """Seed, epoch and the digest the draws belong to count only where there is something to draw."""
    flips = {"flip_x": augmentation.flip_x, "flip_y": augmentation.flip_y}
    if augmentation.seed is None or not augmentation.transforms:
        return flips
    transforms = [
        [one.method, _number(one.p), [[name, _number(low), _number(high)] for name, (low, high) in sorted(one.options)]]
        for one in augmentation.transforms
    ]
    subject = digest if augmentation.of is None else augmentation.of
    return {**flips, "seed": augmentation.seed, "epoch": augmentation.epoch, "of": subject, "transforms": transforms}


def _number(value: float) -> float:
    """1 and 1.0, 0.0 and -0.0 are the same number and become the same text."""
    return float(value) + 0.0
