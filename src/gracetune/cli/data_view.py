"""The output of `gracetune data show`, as tables and sentences or as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gracetune.data.index import DataIndex
from gracetune.data.items import DatasetIndex, Dropped, Item
from gracetune.data.media.probe import AudioFacts, VideoFacts
from gracetune.data.refs import Bucket
from gracetune.data.sampler import Order, SampleGroup
from gracetune.data.staging.memory import StagingEstimate, format_decimal
from gracetune.data.text_format import counted, some

FORMAT = 1
_NAMES_IN_JSON = 100
_CAPTIONS_IN_JSON = 8


@dataclass(frozen=True)
class Shown:
    """Everything that `data show` prints: the index, its order, and the contact sheets."""

    index: DataIndex
    order: Order
    accumulated: int
    """Micro-batches per optimizer step."""
    sheets: Mapping[tuple[int, str], str]
    """Contact sheet of each group, by the dataset's position and the group's name."""
    notes: tuple[str, ...]
    staged: Mapping[str, StagingEstimate]
    """Main memory that each in_memory dataset will take, by id."""
    lists_items: bool = False
    """Whether the JSON lists every sample."""


def bucket_label(bucket: Bucket, sample_rate: int | None) -> str:
    if bucket.audio_samples:
        length = f"{bucket.audio_samples / sample_rate:.1f} s, " if sample_rate else ""
        return f"{length}{bucket.audio_samples} samples x {counted(bucket.audio_channels, 'channel')}"
    frames = f" x {bucket.frames} frames" if bucket.frames > 1 else ""
    return f"{bucket.width}x{bucket.height}{frames}"


def shape_label(shape: tuple[Bucket, ...], sample_rate: int | None) -> str:
    """The bucket, followed by the buckets of the reference images, if any."""
    own, *others = (bucket_label(bucket, sample_rate) for bucket in shape)
    return f"{own} + {', '.join(others)}" if others else own


def rate_of(index: DataIndex, dataset: DatasetIndex) -> int | None:
    return dataset.dataset.audio.sample_rate or index.geometry.sample_rate


def by_reason(dropped: tuple[Dropped, ...]) -> list[tuple[str, list[Dropped]]]:
    """Dropped files by reason, the most frequent first."""
    groups: dict[str, list[Dropped]] = {}
    for one in dropped:
        groups.setdefault(one.reason, []).append(one)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))


def batches_of(order: Order, group: SampleGroup) -> int:
    return -(-group.total // order.size(group.source, order.batch_size))


def as_json(shown: Shown) -> dict[str, Any]:
    epoch = shown.order.whole_epoch(0, shown.order.batch_size, 0, 1)
    return {
        "format": FORMAT,
        "seed": shown.index.seed,
        "datasets": [_dataset_json(shown, position, found) for position, found in enumerate(shown.index.datasets)],
        "held_out": [
            {"id": found.id, "path": found.dataset.path, "samples": len(found.items), **_items_json(shown, found)}
            for found in shown.index.held_out
        ],
        "first_epoch": {
            "samples": epoch.consumed,
            "batches": epoch.batches,
            "short_batches": epoch.short,
            "batch_size": shown.order.batch_size,
            "optimizer_steps": -(-epoch.batches // shown.accumulated),
        },
        "in_memory": {name: _estimate_json(estimate) for name, estimate in shown.staged.items()},
        "notes": list(shown.notes),
    }


def _estimate_json(estimate: StagingEstimate) -> dict[str, Any]:
    return {"files": estimate.files, "bytes": estimate.raw, "stored_bytes": estimate.stored}


def _dataset_json(shown: Shown, position: int, found: DatasetIndex) -> dict[str, Any]:
    dataset = found.dataset
    groups = [group for group in shown.order.groups if group.source == position]
    return {
        "id": found.id,
        "path": dataset.path,
        "dataset_type": dataset.dataset_type,
        "samples": len(found.items),
        "visits": shown.order.visits(position),
        "repeats": dataset.repeats,
        "probability": dataset.probability,
        "batch_size": shown.order.size(position, shown.order.batch_size),
        "bytes": sum(item.file.size for item in found.items),
        "buckets": [_bucket_json(shown, position, group) for group in groups],
        "dropped": [
            {"reason": reason, "count": len(files),
             "files": [{"path": one.path, "detail": one.detail} for one in files[:_NAMES_IN_JSON]]}
            for reason, files in by_reason(found.dropped)
        ],
        "unreadable": [{"path": one.path, "reason": one.reason} for one in found.unreadable],
        "captions": caption_statistics(found),
        "notes": list(found.notes),
        **_items_json(shown, found),
    }  # fmt: skip


def _items_json(shown: Shown, found: DatasetIndex) -> dict[str, Any]:
    """Every sample, if they are listed. Of many caption variants the first ones."""
    if not shown.lists_items:
        return {}
    rate = rate_of(shown.index, found)
    return {"items": [_item_json(item, rate) for item in found.items]}


def _item_json(item: Item, rate: int | None) -> dict[str, Any]:
    facts = item.file.facts
    width, height = (0, 0) if isinstance(facts, AudioFacts) else (facts.width, facts.height)
    return {
        "path": item.path,
        "width": width,
        "height": height,
        "frames": facts.frames if isinstance(facts, VideoFacts) else 1,
        "bucket": shape_label(item.shape, rate),
        "captions": list(item.captions[:_CAPTIONS_IN_JSON]),
        "caption_origin": item.caption_origin,
    }


def _bucket_json(shown: Shown, position: int, group: SampleGroup) -> dict[str, Any]:
    own, *others = ({"width": b.width, "height": b.height, "frames": b.frames, "audio_samples": b.audio_samples,
                     "audio_channels": b.audio_channels} for b in group.shape)  # fmt: skip
    label = shape_label(group.shape, rate_of(shown.index, shown.index.datasets[position]))
    return {
        **({"name": label} if shown.lists_items else {}),  # the name by which items refer to it
        **own,
        "references": others,
        "samples": len(group.samples),
        "visits": group.total,
        "batches": batches_of(shown.order, group),
        "sheet": shown.sheets.get((position, group.name)),
    }


def caption_statistics(found: DatasetIndex) -> dict[str, Any]:
    words = [len(text.split()) for item in found.items for text in item.captions]
    return {
        "origins": dict(Counter(item.caption_origin for item in found.items)),
        "texts": len({text for item in found.items for text in item.captions}),
        "variants": sum(len(item.captions) for item in found.items),
        "mean_words": round(sum(words) / len(words), 1) if words else 0.0,
        "most_words": max(words, default=0),
        "dropout": found.dataset.captions.dropout,
    }


def print_data(shown: Shown, console: Console) -> None:
    for position, found in enumerate(shown.index.datasets):
        console.print(f"[bold]{escape(found.id)}[/]  {escape(_summary(shown, position, found))}")
        console.print(_buckets(shown, position, found), soft_wrap=False)
        for line in (*_lines(found), *_small_buckets(shown, position, found)):
            console.print(f"  {escape(line)}")
        console.print()
    for found in shown.index.held_out:
        console.print(f"[bold]{escape(found.id)}[/]  held out: {counted(len(found.items), 'sample')}")
        console.print()
    for name, estimate in shown.staged.items():
        console.print(
            f"in memory  {escape(name)}: about {format_decimal(estimate.stored)} to keep ({escape(str(estimate))})"
        )
    console.print(escape(_epoch(shown)))
    for note in shown.notes:
        console.print(f"note  {escape(note)}")


def _summary(shown: Shown, position: int, found: DatasetIndex) -> str:
    samples, visits = len(found.items), shown.order.visits(position)
    often = "" if visits == samples else f", {counted(visits, 'visit')} an epoch"
    mixed = f", probability {found.dataset.probability:g}" if len(shown.index.datasets) > 1 else ""
    kind = {"image": "images", "video": "videos"}.get(found.dataset.dataset_type, "sounds")
    return f"{kind} of {found.dataset.path}: {counted(samples, 'sample')}{often}{mixed}"


def _buckets(shown: Shown, position: int, found: DatasetIndex) -> Table:
    size = shown.order.size(position, shown.order.batch_size)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("  bucket", no_wrap=True)
    table.add_column("ratio", justify="right")
    table.add_column("samples", justify="right")
    table.add_column("visits", justify="right")
    table.add_column(f"batches of {size}", justify="right")
    for group in shown.order.groups:
        if group.source == position:
            own = group.shape[0]
            ratio = f"{own.width / own.height:.2f}" if own.height else ""
            label = shape_label(group.shape, rate_of(shown.index, found))
            table.add_row(f"  {label}", ratio, str(len(group.samples)), str(group.total),
                          str(batches_of(shown.order, group)))  # fmt: skip
    return table


def _lines(found: DatasetIndex) -> Iterator[str]:
    for reason, files in by_reason(found.dropped):
        first = f"{files[0].path} ({files[0].detail})"
        rest = f", {some([one.path for one in files[1:]])}" if len(files) > 1 else ""
        yield f"dropped   {len(files)} {reason}: {first}{rest}"
    statistics = caption_statistics(found)
    own = statistics["origins"].get("own", 0)
    dropout = f", dropped {statistics['dropout']:.0%} of the time" if statistics["dropout"] else ""
    yield (
        f"captions  {own} of {counted(len(found.items), 'sample')}, {counted(statistics['texts'], 'text')}, "
        f"{statistics['mean_words']:g} words on average and {statistics['most_words']} at most{dropout}"
    )
    for note in found.notes:
        yield f"note      {note}"


def _small_buckets(shown: Shown, position: int, found: DatasetIndex) -> Iterator[str]:
    """A note if most buckets never fill a batch. Usually the images were cropped by hand, each to its own ratio."""
    size = shown.order.size(position, shown.order.batch_size)
    groups = [group for group in shown.order.groups if group.source == position]
    small = [group for group in groups if group.total < size]
    if 2 * len(small) > len(groups) > 1:
        few = (
            "; crop.aspect closest with a few aspect_buckets gathers them"
            if found.dataset.dataset_type != "audio"
            else ""
        )
        yield f"note      {len(small)} of {len(groups)} buckets have fewer samples than a batch of {size}{few}"


def _epoch(shown: Shown) -> str:
    cursor = shown.order.whole_epoch(0, shown.order.batch_size, 0, 1)
    smaller = f", {cursor.short} of them smaller" if cursor.short else ""
    steps = -(-cursor.batches // shown.accumulated)
    return (
        f"the first epoch: {counted(cursor.consumed, 'sample')} in {counted(cursor.batches, 'batch')} of "
        f"{shown.order.batch_size}{smaller}, {counted(steps, 'optimizer step')} on one GPU"
    )
