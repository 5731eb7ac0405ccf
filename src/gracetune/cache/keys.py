"""Cache keys: a hash of everything that determines the content of an entry, and of nothing else.

An `EntryOrigin` lists these inputs as named text values, its parts. The key is the BLAKE2b-128 hash of the origin. File
name, dataset, loss weight and (for latents) caption are not parts, so a renamed file keeps its entries. Origins are
stored with the entries, so an audit can report *which* part of a stale entry differs.

The hash input is a sequence of strings: the key version, the kind, the source, then the name and value of each part,
sorted by name. Each string is preceded by its length in bytes and a colon, so two different sequences never produce
the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal, NewType

from gracetune.cache.encoder import EncoderId
from gracetune.data.refs import AppliedAugmentation, Bucket, Clip, Fit, MaskRef, SampleRef

KEY_VERSION = 1
"""Part of every key. Increase it when the same parts produce a different entry."""

# Shared, because json.dumps with these arguments would build a new encoder for every part of every key.
_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)

_NO_IMAGES = ("pictures", "[]")
_LONG = 80
"""Values of this many characters or more are not memoized: they are specific to one sample."""

Key = NewType("Key", str)
"""32 lower-case hexadecimal digits."""


@dataclass(frozen=True)
class EntryOrigin:
    """All inputs of an entry. Entries with equal origins are equal."""

    kind: Literal["latent", "text"]
    source: str
    """Digest of the file's content, or of the text."""
    parts: tuple[tuple[str, str], ...]
    """Pairs of name and value, sorted by name: `bucket`, `fit`, ..., `encoder.weights`, `encoder.settings.dtype`."""

    @property
    def key(self) -> Key:
        strings = [_framed(str(KEY_VERSION)), _framed(self.kind), _framed(self.source)]
        # Short parts recur in many entries, so their bytes are memoized. Long ones contain digests of single files.
        strings += [_memoized_part(part) if len(part[1]) < _LONG else _framed_part(part) for part in self.parts]
        return Key(blake2b(b"".join(strings), digest_size=16).hexdigest())


def latent_origin(ref: SampleRef, encoder: EncoderId) -> EntryOrigin:
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
    return EntryOrigin("latent", ref.digest, tuple(sorted((*own, *_encoder_parts(encoder)))))


def latent_key(ref: SampleRef, encoder: EncoderId) -> Key:
    return latent_origin(ref, encoder).key


def text_origin(text: str, encoder: EncoderId, images: Sequence[SampleRef] = ()) -> EntryOrigin:
    """The origin of a text embedding.

    `text` is the caption as the encoder receives it. `images` are the reference images that the embedding also
    depends on (edit models). Pass none for an encoder whose `reads_images` is False: all samples with the same
    caption then share one embedding.
    """
    if encoder.kind != "text":
        raise ValueError(f"a text embedding made by an encoder of kind {encoder.kind!r}")
    own = ("pictures", _text([_content(image) for image in images])) if images else _NO_IMAGES
    return EntryOrigin("text", _digest(text), _sorted_parts(own, encoder))


def text_key(text: str, encoder: EncoderId, images: Sequence[SampleRef] = ()) -> Key:
    return text_origin(text, encoder, images).key


def _digest(text: str) -> str:
    return blake2b(_framed(text), digest_size=16).hexdigest()


def _framed(string: str) -> bytes:
    raw = string.encode("utf-8", "surrogatepass")  # file names and captions may contain lone surrogates
    return b"%d:%b" % (len(raw), raw)


def _framed_part(part: tuple[str, str]) -> bytes:
    return _framed(part[0]) + _framed(part[1])


_memoized_part = lru_cache(maxsize=1 << 13)(_framed_part)


def _text(value: Any) -> str:
    return _JSON.encode(value)


@lru_cache(maxsize=64)
def _sorted_parts(own: tuple[str, str], encoder: EncoderId) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((own, *_encoder_parts(encoder))))


@lru_cache(maxsize=64)
def _encoder_parts(encoder: EncoderId) -> tuple[tuple[str, str], ...]:
    settings = ((f"encoder.settings.{name}", value) for name, value in encoder.settings)
    return (("encoder.weights", encoder.weights), *settings)


def _content(ref: SampleRef) -> dict[str, Any]:
    """Everything that determines the result of `data.load(ref)`, as plain data."""
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


def _augmentation_text(augmentation: AppliedAugmentation, digest: str) -> str:
    if augmentation.seed is None or not augmentation.transforms:
        return _flips_text(augmentation.flip_x, augmentation.flip_y)
    return _text(_augmentation(augmentation, digest))


@lru_cache(maxsize=4)
def _flips_text(flip_x: bool, flip_y: bool) -> str:
    return _text(_augmentation(AppliedAugmentation(flip_x, flip_y), ""))


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


def _augmentation(augmentation: AppliedAugmentation, digest: str) -> dict[str, Any]:
    """Flips always count. Seed, epoch and the digest that seeds the generator count only with random transforms."""
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
    """Normalize so that equal numbers have equal text: 1 becomes 1.0, and -0.0 becomes 0.0."""
    return float(value) + 0.0
