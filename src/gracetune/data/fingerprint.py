"""What data a run uses, in a few short digests: a resumed run compares them and says what changed.

Format version 2: for each trained dataset the number of `items` and xxh3-128 digests of its `files` (path and content
of every item, its references and its mask), of their `shapes` (buckets, and visits per epoch), of its `captions` (every
variant of every item) and of its `settings` (those that decide what a sample looks like and when it comes, as far as
they are not the defaults: a release that adds a setting does not change the digest of data that does not use it; one
that changes a default has to raise the version). Where the data lies and how it is staged is not part of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import xxhash

from gracetune.config.dataset_config import Dataset
from gracetune.data.errors import DataError
from gracetune.data.items import DatasetIndex, Item
from gracetune.data.refs import Bucket
from gracetune.memory.reclaim import rare_collections

FINGERPRINT_VERSION = 2

_ELSEWHERE = frozenset(
    (
        "path",
        "type",
        "disabled",
        "in_memory",
        "storage",
        "local_copy",
        "cache_dir",
        "corrupt_threshold",
        "captions",
        "conditioning",
        "mask",
    )
)
"""Settings that change no sample, or whose effect is in the items themselves."""


@dataclass(frozen=True)
class DatasetPrint:
    items: int
    files: str
    shapes: str
    captions: str
    settings: str


@dataclass(frozen=True)
class Fingerprint:
    datasets: Mapping[str, DatasetPrint]

    def as_json(self) -> dict[str, Any]:
        return {
            "version": FINGERPRINT_VERSION,
            "datasets": {name: asdict(found) for name, found in self.datasets.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Fingerprint:
        if value.get("version") != FINGERPRINT_VERSION:
            raise DataError(
                f"a fingerprint of version {value.get('version')}; this release reads version {FINGERPRINT_VERSION}. "
                "Resume with the release that saved it, or start the data anew with --resume none"
            )
        return cls({name: DatasetPrint(**found) for name, found in value["datasets"].items()})


def fingerprint(datasets: Iterable[DatasetIndex]) -> Fingerprint:
    with rare_collections():
        return Fingerprint({index.id: _of_dataset(index) for index in datasets})


def differences(before: Fingerprint, now: Fingerprint) -> tuple[str, ...]:
    """What changed, one line for each dataset that did; empty where nothing did."""
    lines = [f"dataset {name} is gone" for name in before.datasets if name not in now.datasets]
    lines += [f"dataset {name} is new" for name in now.datasets if name not in before.datasets]
    for name, old in before.datasets.items():
        new = now.datasets.get(name)
        if new is None or new == old:
            continue
        lines.append(f"dataset {name}: {', '.join(_changes(old, new))}")
    return tuple(lines)


def _changes(old: DatasetPrint, new: DatasetPrint) -> list[str]:
    settings = ["other settings"] if new.settings != old.settings else []
    if new.items != old.items:
        return [f"{old.items} samples then, {new.items} now", *settings]
    what = ["other files"] if new.files != old.files else []
    what += ["other buckets or visits"] if new.shapes != old.shapes else []
    what += ["other captions"] if new.captions != old.captions else []
    return [*what, *settings]


def _of_dataset(index: DatasetIndex) -> DatasetPrint:
    return DatasetPrint(
        items=len(index.items),
        files=_digest([_files(item) for item in index.items]),
        shapes=_digest([[item.visits, *map(_bucket, item.shape)] for item in index.items]),
        captions=_digest([[item.path, *_captions(item, index.dataset)] for item in index.items]),
        settings=_digest(_settings(index.dataset)),
    )


def _files(item: Item) -> list[Any]:
    references = [[one.dataset.id, one.file.path, one.file.digest] for one in item.references]
    return [item.path, item.file.digest, references, None if item.mask is None else asdict(item.mask)]


@lru_cache(maxsize=1 << 10)
def _bucket(bucket: Bucket) -> dict[str, int]:
    return asdict(bucket)


def _settings(dataset: Dataset) -> dict[str, Any]:
    values = dataset.model_dump(mode="json", exclude=set(_ELSEWHERE), exclude_defaults=True)
    # Of the captions section only what is decided while training: everything else is in the captions.
    captions = dataset.captions
    decided = {"caption_dropout": captions.dropout, "dropped_caption": captions.dropped_caption}
    return {**values, **{name: value for name, value in decided.items() if captions.dropout and value}}


def _captions(item: Item, dataset: Dataset) -> tuple[str, ...]:
    """As many orders of the tags as a longer run has more of are no other data."""
    by_visit = dataset.captions.shuffle_tags and dataset.captions.shuffle_variants == "visits"
    return item.captions[:1] if by_visit else item.captions


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_128_hexdigest(text.encode())
