"""Putting one dataset of an ai-toolkit job into the draft, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from gracetune.config.dialects.aitoolkit.dataset_keys import DATASET
from gracetune.config.dialects.aitoolkit.keys import PEER, Block, Reading, number, put_rows, real, whole
from gracetune.config.dialects.aitoolkit.model import Target
from gracetune.config.dialects.aitoolkit.train import Training
from gracetune.config.dialects.simpletuner.dataset_keys import IN_MEMORY_KEYS
from gracetune.config.dialects.simpletuner.gh200 import known_block, put_in_memory
from gracetune.config.dialects.simpletuner.values import Options
from gracetune.config.draft import Draft, Origin, Path

CONTROL_RESOLUTION = 1024
"""Upstream scales the references of Qwen-Image-Edit-2509 to this square's area, whatever the target's size."""
UPSTREAM_FPS = 24
TO_DISK = "cache_latents_to_disk"


@dataclass(frozen=True)
class Entry:
    """One entry of the list, its switches read once however many resolutions it has."""

    block: Block
    target: Target
    training: Training
    trigger: Any
    trigger_key: str
    is_reg: bool
    video: bool
    whole_clip: bool
    from_length: bool
    image_to_video: bool
    caching: str | None
    """Where latents are kept: `disk`, `memory`, or None where they are encoded anew in every step."""
    random_crop: bool
    storage: str | None
    """Where its files and its references' are read from: `local` or `in_memory`."""
    controls: tuple[tuple[str, Any], ...]
    """Key and folder of each reference."""
    controls_in_own_shape: bool


@dataclass(frozen=True)
class Cut:
    """An entry at one of its resolutions: one dataset of ours."""

    entry: Entry
    id: str
    resolution: Any
    key: str


def put_dataset(reading: Reading, cut: Cut, root: Path) -> None:
    block = cut.entry.block
    reading.put((*root, "id"), cut.id, cut.key)
    if block.get("resolution") is None:
        reading.default((*root, "resolution"), cut.resolution)
    else:
        reading.put((*root, "resolution"), cut.resolution, cut.key)
    put_rows(reading, block, DATASET, root)
    _folder(reading, block, root)
    _storage(reading, cut.entry, root)
    _captions(reading, cut.entry, (*root, "captions"))
    _cache(reading, cut.entry, root)
    _crop(reading, cut.entry, (*root, "crop"))
    if cut.entry.video:
        _video(reading, cut.entry, root)
    if block.get("mask_path"):
        reading.put((*root, "mask", "path"), block.get("mask_path"), block.key("mask_path"))
    elif number(block.get("mask_min_value")) == 0.1:  # the web interface writes it into every job: nobody asked for it
        reading.draft.put((*root, "mask", "min_weight"), 0.1, Origin("default", block.key("mask_min_value"), PEER))
    if block.get("num_repeats") is not None:
        # Upstream counts visits, we count the visits after the first.
        visits = number(block.get("num_repeats"))
        reading.put((*root, "repeats"), visits - 1 if whole(visits) is not None else visits, block.key("num_repeats"))
    _weight(reading, cut.entry, root)


def _folder(reading: Reading, block: Block, root: Path) -> None:
    """`dataset_path` may be a JSON file of captions by path; its images lie next to it."""
    name = next((name for name in ("dataset_path", "folder_path") if block.get(name)), None)
    if name is None:
        key = block.key("folder_path")
        if not reading.said(key, block.prefix):
            reading.draft.problem(key, block.get("folder_path"), "the folder of the dataset", "add `folder_path`")
        reading.put((*root, "path"), "missing", key)  # said already: the schema need not say it again
        return
    path, key = block.get(name), block.key(name)
    if name == "dataset_path" and isinstance(path, str) and path.lower().endswith(".json"):
        reading.put((*root, "path"), str(PurePosixPath(path).parent), key)
        reading.put((*root, "captions", "strategy"), "json", key)
        reading.put((*root, "captions", "table", "path"), path, key)
    else:
        reading.put((*root, "path"), path, key)


def _storage(reading: Reading, entry: Entry, root: Path) -> None:
    """The same block as in a SimpleTuner dataset."""
    block = entry.block
    if entry.storage is not None:
        reading.put((*root, "type"), entry.storage, block.key("type"))
    options = Options.block({"in_memory": block.get("in_memory")}, reading.file, f"{block.prefix}.")
    staging = known_block(options, reading.draft, "in_memory", IN_MEMORY_KEYS)
    if staging is not None:
        put_in_memory(staging, reading.draft, root)


def _captions(reading: Reading, entry: Entry, captions: Path) -> None:
    block = entry.block
    reading.default((*captions, "split_lines"), False)
    name = "caption_type" if block.get("caption_type") else "caption_ext"
    extension = block.get(name)
    if extension:
        extension = extension.lstrip(".") if isinstance(extension, str) else extension
        reading.put((*captions, "extension"), extension, block.key(name))
    if block.get("keep_tokens") is not None:
        reading.put((*captions, "keep_tags"), number(block.get("keep_tokens")), block.key("keep_tokens"))
    trigger = entry.trigger if entry.trigger and not entry.is_reg else None
    if entry.training.one_prompt:
        reading.put((*captions, "strategy"), "instanceprompt", entry.training.block.key("unload_text_encoder"))
        reading.put((*captions, "instance_prompt"), trigger or "", entry.trigger_key)
        return
    if block.get("default_caption") is not None:
        reading.put((*captions, "default"), block.get("default_caption"), block.key("default_caption"))
    if trigger is not None:
        reading.put((*captions, "trigger_word"), trigger, entry.trigger_key)


def _cache(reading: Reading, entry: Entry, root: Path) -> None:
    block, augmentation = entry.block, (*root, "augmentation")
    _latents(reading, entry, root)
    if entry.caching is not None:
        # Upstream caches a flipped copy next to the original, so flips alone never switch its cache off.
        reading.default((*augmentation, "cache_mode"), "static")
    ours = {"augmentations": "transforms", "augmentations_cache_mode": "cache_mode"}
    for name, field in {**ours, "flip_x": "flip_x", "flip_y": "flip_y"}.items():
        if block.get(name) is not None:
            reading.put((*augmentation, field), block.get(name), block.key(name))


def _latents(reading: Reading, entry: Entry, root: Path) -> None:
    if entry.caching is None:
        reading.default((*root, "cache_latents"), "none")
        return
    name = TO_DISK if entry.caching == "disk" else "cache_latents"
    reading.put((*root, "cache_latents"), entry.caching, entry.block.key(name))


def settle_caches(draft: Draft) -> None:
    """A `cache.vae_cache_type` that is given is where latents are kept, for each dataset that says nothing against it.

    `cache_latents_to_disk` asks that latents outlive the run, and the cache on disk does so wherever they are read
    from; a job without either key has upstream's default, which is no wish.
    """
    kind = draft.origins.get(("cache", "vae_cache_type"))
    datasets = draft.get(("datasets",))
    if kind is None or kind.kind == "default" or not isinstance(datasets, list):
        return
    for index in range(len(datasets)):
        path: Path = ("datasets", index, "cache_latents")
        own = draft.origins.get(path)
        if own is not None and (own.kind == "default" or (own.kind == "file" and own.key.endswith(f".{TO_DISK}"))):
            draft.put(path, None, own)


def _crop(reading: Reading, entry: Entry, crop: Path) -> None:
    block = entry.block
    squares = {"square_crop": True, "buckets": False}
    square = next((name for name, value in squares.items() if block.get(name) is value), None)
    cause = square or ("random_crop" if entry.random_crop else None)
    if cause is not None:
        reading.put((*crop, "enabled"), True, block.key(cause))
        reading.put((*crop, "aspect"), "square" if square else "preserve", block.key(cause))
    if entry.random_crop:
        reading.put((*crop, "style"), "random", block.key("random_crop"))
    else:
        reading.default((*crop, "style"), "center")


def _video(reading: Reading, entry: Entry, root: Path) -> None:
    block, video = entry.block, (*root, "video")
    key = block.key("auto_frame_count" if entry.from_length else "num_frames")
    reading.put((*root, "dataset_type"), "video", key)
    if entry.from_length:
        reading.put((*video, "from_length"), True, key)
    else:
        reading.put((*video, "num_frames"), number(block.get("num_frames")), key)
    if entry.whole_clip:
        reading.put((*video, "whole_clip"), True, block.key("shrink_video_to_frames"))
    elif block.get("fps") is not None:
        reading.put((*video, "fps"), number(block.get("fps")), block.key("fps"))
    else:
        reading.default((*video, "fps"), UPSTREAM_FPS)
    if not entry.whole_clip and not entry.from_length:
        reading.put((*video, "clip"), "random", block.key("shrink_video_to_frames"))
    if entry.image_to_video:
        reading.put((*video, "image_to_video"), True, block.key("do_i2v"))


def _weight(reading: Reading, entry: Entry, root: Path) -> None:
    """Images of `is_reg` are learnt like any other and count `reg_weight` on top of their own multiplier."""
    block = entry.block
    weight, factor = number(block.get("loss_multiplier")), entry.training.reg_weight if entry.is_reg else 1.0
    own = 1.0 if weight is None else real(weight)
    if factor != 1.0 and own is not None:
        reading.put((*root, "loss_weight"), own * factor, entry.training.block.key("reg_weight"))
    elif weight is not None:
        reading.put((*root, "loss_weight"), weight, block.key("loss_multiplier"))


def put_controls(reading: Reading, cut: Cut, owner: Path, free: int) -> None:
    """An entry's reference folders, from the first free place of the list on."""
    entry = cut.entry
    kind = entry.target.arch.references if entry.controls_in_own_shape else "reference_strict"
    own_size = kind == "reference_loose" and not entry.target.match_target_res
    names = [f"{cut.id}-control-{position}" for position in range(1, len(entry.controls) + 1)]
    for position, (name, (key, folder)) in enumerate(zip(names, entry.controls, strict=True)):
        values = {
            "id": name,
            "path": folder,
            "dataset_type": "conditioning",
            "conditioning_type": kind,
            "source_dataset_id": cut.id,
            "resolution": CONTROL_RESOLUTION if own_size else cut.resolution,
        }
        root: Path = ("datasets", free + position)
        for field, value in values.items():
            reading.put((*root, field), value, key)
        _storage(reading, entry, root)
        _latents(reading, entry, root)
    if names:
        reading.put((*owner, "conditioning"), names, entry.block.key("control_path"))
