"""Data fingerprints: short digests of the data a run uses. A resumed run compares them and reports what changed.

Format version 2 holds for each trained dataset:

- `items`: the number of items
- `files`: the path and content of every item, its references and its mask
- `shapes`: buckets and visits per epoch
- `captions`: every caption variant of every item
- `settings`: the settings that decide how a sample looks and when it comes, without those at their default

All but `items` are xxh3-128 digests. Because defaults are left out, a release that adds a setting does not change the
digest of data that does not use it. A release that changes a default must raise the version. The location of the data
and the way it is staged are not part of the fingerprint.
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
"""Settings without effect on samples, and settings whose effect shows in the items themselves."""


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
                "Resume with the release that saved it, or start over with --resume none"
            )
        return cls({name: DatasetPrint(**found) for name, found in value["datasets"].items()})


def fingerprint(datasets: Iterable[DatasetIndex]) -> Fingerprint:
    with rare_collections():
        return Fingerprint({index.id: _of_dataset(index) for index in datasets})


def differences(before: Fingerprint, now: Fingerprint) -> tuple[str, ...]:
    """One line for each dataset that changed; empty if nothing did."""
    lines = [f"dataset {name} was removed" for name in before.datasets if name not in now.datasets]
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
    # Of the captions section, only what takes effect during training. The rest shows in the captions themselves.
    captions = dataset.captions
    during_training = {"caption_dropout": captions.dropout, "dropped_caption": captions.dropped_caption}
    return {**values, **{name: value for name, value in during_training.items() if captions.dropout and value}}


def _captions(item: Item, dataset: Dataset) -> tuple[str, ...]:
    """The captions that identify an item. With `shuffle_variants: visits` a longer run has more tag orders of the same
    caption, which are not different data, so only the first counts."""
    by_visit = dataset.captions.shuffle_tags and dataset.captions.shuffle_variants == "visits"
    return item.captions[:1] if by_visit else item.captions


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_128_hexdigest(text.encode())
