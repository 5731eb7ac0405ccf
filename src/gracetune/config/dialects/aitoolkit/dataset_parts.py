"""Puts one dataset of an ai-toolkit job into the draft, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from gracetune.config.dialects.aitoolkit.job import AiToolkitJob
from gracetune.config.dialects.aitoolkit.keys import PEER, UNSUPPORTED_DATASET_KEYS, UNUSED_DATASET_KEYS, section
from gracetune.config.dialects.gh200 import read_in_memory
from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.table import Key, KeyRule, read_elsewhere
from gracetune.config.dialects.values import as_number, real, whole
from gracetune.config.draft import Draft, Origin, Path

CONTROL_RESOLUTION = 1024
"""Upstream scales the references of Qwen-Image-Edit-2509 to the area of this square, whatever the target's size."""
UPSTREAM_FPS = 24
LARGEST = 1e12
"""A `maximum_size` that no image exceeds."""
TO_DISK = "cache_latents_to_disk"


@dataclass(frozen=True)
class DatasetEntry:
    """One entry of the list. Its switches are read once, however many resolutions it has."""

    block: PeerBlock
    job: AiToolkitJob
    trigger: Any
    trigger_key: str
    is_reg: bool
    caches_text: bool
    video: bool
    whole_clip: bool
    from_length: bool
    image_to_video: bool
    caching: str | None
    """Where latents are cached: `disk`, `memory`, or None if they are encoded anew in every step."""
    random_crop: bool
    storage: str | None
    """Where its files and those of its references are read from: `local` or `in_memory`."""
    controls: tuple[tuple[str, Any], ...]
    """Key and folder of each reference."""
    controls_in_own_shape: bool

    def put(self, path: Path, value: Any, key: str) -> None:
        """Put a value that is derived from a key anywhere in the job."""
        self.block.draft.put(path, value, Origin("file", key, self.block.file))


@dataclass(frozen=True)
class EntryAtResolution:
    """An entry at one of its resolutions: one dataset of ours."""

    entry: DatasetEntry
    id: str
    resolution: Any
    key: str
    """The key that has the resolution, for origins: `...datasets[0].resolution[1]`."""
    root: Path
    """The path of the dataset in our config: ("datasets", index)."""

    @property
    def visits(self) -> Any:
        """Visits of each file in an epoch. A `num_repeats` that is not a whole number is returned unchanged."""
        block = self.entry.block
        repeats = as_number(block.get("num_repeats"))
        flips = 2 ** [block.get(name) for name in ("flip_x", "flip_y")].count(True)
        return flips if repeats is None else max(1, repeats) * flips if whole(repeats) is not None else repeats


def _resolution(block: PeerBlock, dataset: EntryAtResolution) -> None:
    dataset.entry.put((*dataset.root, "id"), dataset.id, dataset.key)
    if block.get("resolution") is None:
        block.default((*dataset.root, "resolution"), dataset.resolution)
    else:
        dataset.entry.put((*dataset.root, "resolution"), dataset.resolution, dataset.key)


def _buckets(block: PeerBlock, dataset: EntryAtResolution) -> None:
    """Upstream does not enlarge images, and its bucket sizes depend on the model. `bucket_tolerance` has no effect."""
    buckets, arch = (*dataset.root, "buckets"), dataset.entry.job.target.arch
    block.default((*buckets, "rule"), "at_most")
    if arch.bucket_step is not None:
        block.default((*buckets, "multiple"), arch.bucket_step)


def _folder(block: PeerBlock, dataset: EntryAtResolution) -> None:
    """Read the dataset's folder. `dataset_path` can be a JSON file of captions by path, with the images next to it."""
    root = dataset.root
    name = next((name for name in ("dataset_path", "folder_path") if block.get(name)), None)
    if name is None:
        if not any(problem.key in (block.key_path, block.key("folder_path")) for problem in block.draft.problems):
            block.problem("folder_path", "the folder of the dataset", "add `folder_path`")
        block.assign((*root, "path"), "missing", "folder_path")  # a placeholder, because the problem is reported
        return
    path = block.get(name)
    if name == "dataset_path" and isinstance(path, str) and path.lower().endswith(".json"):
        block.assign((*root, "path"), str(PurePosixPath(path).parent), name)
        block.assign((*root, "captions", "strategy"), "json", name)
        block.assign((*root, "captions", "table", "path"), path, name)
    else:
        block.assign((*root, "path"), path, name)


def _storage(block: PeerBlock, dataset: EntryAtResolution) -> None:
    """Read the storage and the `in_memory` block, which is the same as in a SimpleTuner dataset."""
    put_storage(dataset.entry, dataset.root)


def put_storage(entry: DatasetEntry, root: Path) -> None:
    if entry.storage is not None:
        entry.block.assign((*root, "type"), entry.storage, "type")
    read_in_memory(entry.block, root)


def _captions(block: PeerBlock, dataset: EntryAtResolution) -> None:
    entry, captions = dataset.entry, (*dataset.root, "captions")
    block.default((*captions, "split_lines"), False)
    name = "caption_type" if block.get("caption_type") else "caption_ext"
    extension = block.get(name)
    if extension:
        extension = extension.lstrip(".") if isinstance(extension, str) else extension
        block.assign((*captions, "extension"), extension, name)
    block.put("keep_tokens", (*captions, "keep_tags"), as_number)
    if entry.job.one_prompt:
        own = entry.trigger if entry.trigger and not entry.is_reg else ""
        entry.put((*captions, "strategy"), "instanceprompt", entry.job.train.key("unload_text_encoder"))
        entry.put((*captions, "instance_prompt"), own, entry.trigger_key)
        return
    block.put("caption_dropout_rate", (*captions, "dropout"), as_number)
    block.put("default_caption", (*captions, "default"))
    if block.get("default_caption"):
        block.default((*captions, "default_for_empty"), True)
    if entry.trigger:
        entry.put((*captions, "trigger_word"), entry.trigger, entry.trigger_key)
    if entry.trigger and entry.is_reg:
        block.assign((*captions, "add_trigger"), False, "is_reg")
    _dropped(block, dataset)
    _shuffled(block, dataset)


def _dropped(block: PeerBlock, dataset: EntryAtResolution) -> None:
    """Upstream adds a trigger word to dropped captions too: the job's or, with cached texts, the dataset's."""
    entry = dataset.entry
    word = entry.trigger if entry.caches_text else entry.job.process.get("trigger_word")
    if isinstance(word, str) and word.strip() and not entry.is_reg:
        block.default((*dataset.root, "captions", "dropped_caption"), f"{word} ")


def _shuffled(block: PeerBlock, dataset: EntryAtResolution) -> None:
    """Upstream shuffles tags anew at every visit or, with cached texts, once for each repeat of an image."""
    captions, entry = (*dataset.root, "captions"), dataset.entry
    block.put("shuffle_tokens", (*captions, "shuffle_tags"))
    if block.get("shuffle_tokens") is not True:
        return
    visits = whole(dataset.visits)
    block.default((*captions, "shuffle_variants"), visits if entry.caches_text and visits else "visits")
    block.default((*captions, "shuffle_written"), False)
    if entry.trigger:
        block.default((*captions, "shuffle_trigger"), True)


def _cache(block: PeerBlock, dataset: EntryAtResolution) -> None:
    augmentation = (*dataset.root, "augmentation")
    put_latents(dataset.entry, dataset.root)
    if dataset.entry.caching is not None:
        # Upstream caches a flipped copy next to the original, so flips alone do not disable its cache.
        block.default((*augmentation, "cache_mode"), "static")
    ours = {"augmentations": "transforms", "augmentations_cache_mode": "cache_mode"}
    for name, field in {**ours, "flip_x": "flip_x", "flip_y": "flip_y"}.items():
        block.put(name, (*augmentation, field))


def put_latents(entry: DatasetEntry, root: Path) -> None:
    if entry.caching is None:
        entry.block.default((*root, "cache_latents"), "none")
        return
    name = TO_DISK if entry.caching == "disk" else "cache_latents"
    entry.block.assign((*root, "cache_latents"), entry.caching, name)


def settle_caches(draft: Draft) -> None:
    """Let a `cache.vae_cache_type` that is set apply to each dataset that did not choose another cache.

    `cache_latents_to_disk` is compatible with it: the user wants latents to outlive the run, and the cache on disk
    does, whatever they are read from. A job without either key has upstream's default, which is not a choice.
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


def _crop(block: PeerBlock, dataset: EntryAtResolution) -> None:
    crop = (*dataset.root, "crop")
    squares = {"square_crop": True, "buckets": False}
    square = next((name for name, value in squares.items() if block.get(name) is value), None)
    cause = square or ("random_crop" if dataset.entry.random_crop else None)
    if cause is not None:
        block.assign((*crop, "enabled"), True, cause)
        block.assign((*crop, "aspect"), "square" if square else "preserve", cause)
    if dataset.entry.random_crop:
        block.assign((*crop, "style"), "random", "random_crop")
    else:
        block.default((*crop, "style"), "center")
    if dataset.entry.random_crop and square == "buckets":
        # Upstream crops squares from images of any size.
        block.default((*dataset.root, "maximum_size"), LARGEST)
        block.default((*dataset.root, "downsample_to"), dataset.resolution)


def _video(block: PeerBlock, dataset: EntryAtResolution) -> None:
    entry, video = dataset.entry, (*dataset.root, "video")
    if not entry.video:
        return
    name = "auto_frame_count" if entry.from_length else "num_frames"
    block.assign((*dataset.root, "dataset_type"), "video", name)
    block.default((*video, "frame_choice"), "numbers")
    if entry.from_length:
        block.assign((*video, "from_length"), True, name)
    else:
        block.assign((*video, "num_frames"), as_number(block.get("num_frames")), name)
    if entry.whole_clip:
        block.assign((*video, "whole_clip"), True, "shrink_video_to_frames")
    elif block.get("fps") is not None:
        block.put("fps", (*video, "fps"), as_number)
    else:
        block.default((*video, "fps"), UPSTREAM_FPS)
    if not entry.whole_clip and not entry.from_length:
        block.assign((*video, "clip"), "random", "shrink_video_to_frames")
    if entry.image_to_video:
        block.assign((*video, "image_to_video"), True, "do_i2v")


def _mask(block: PeerBlock, dataset: EntryAtResolution) -> None:
    mask = (*dataset.root, "mask")
    if block.get("mask_path") or block.get("alpha_mask") is True:
        block.default((*mask, "normalise"), True)
    if block.get("mask_path"):
        block.put("mask_path", (*mask, "path"))
    elif as_number(block.get("mask_min_value")) == 0.1:
        # The web interface writes this value into every job, so it counts as a default.
        block.draft.put((*mask, "min_weight"), 0.1, Origin("default", block.key("mask_min_value"), PEER))


def _repeats(block: PeerBlock, dataset: EntryAtResolution) -> None:
    """Read `num_repeats`. Upstream's epoch has every image that often, and as often again for each flip."""
    visits, path = dataset.visits, (*dataset.root, "repeats")
    block.default((*dataset.root, "kohya_folders"), False)
    if whole(visits) is None:
        block.put("num_repeats", path, as_number)
    elif block.get("num_repeats") is not None:
        block.assign(path, visits - 1, "num_repeats")
    elif visits > 1:
        block.default(path, visits - 1)


def _turns(block: PeerBlock, dataset: EntryAtResolution) -> None:
    if not dataset.entry.is_reg:
        return
    block.assign((*dataset.root, "even_steps"), True, "is_reg")
    if dataset.entry.job.batches_per_step > 1:
        key = dataset.entry.job.train.key("gradient_accumulation_steps")
        block.note(
            f"{block.key('is_reg')}: every second optimizer step; with `{key}` ai-toolkit changes at every batch"
        )


def _weight(block: PeerBlock, dataset: EntryAtResolution) -> None:
    """Read the loss weight. Images with `is_reg` train like others, with `reg_weight` times their own multiplier."""
    entry, path = dataset.entry, (*dataset.root, "loss_weight")
    weight, factor = as_number(block.get("loss_multiplier")), entry.job.reg_weight if entry.is_reg else 1.0
    own = 1.0 if weight is None else real(weight)
    if factor != 1.0 and own is not None:
        entry.put(path, own * factor, entry.job.train.key("reg_weight"))
    elif weight is not None:
        block.assign(path, weight, "loss_multiplier")


DATASET = section(
    KeyRule(_resolution, "resolution"),
    KeyRule(_buckets),
    Key("batch_size", ("batch_size",), as_number),
    Key("network_weight", ("adapter_strength",), as_number),
    Key("mask_min_value", ("mask", "min_weight"), as_number),
    Key("alpha_mask", ("mask", "from_alpha")),
    Key("invert_mask", ("mask", "invert")),
    Key("prior_reg", ("regularisation",)),
    KeyRule(_folder, "folder_path dataset_path"),
    KeyRule(_storage, "type in_memory"),
    KeyRule(
        _captions,
        "caption_ext caption_type caption_dropout_rate keep_tokens shuffle_tokens default_caption trigger_word",
    ),
    KeyRule(_cache, "cache_latents", TO_DISK, "flip_x flip_y augmentations augmentations_cache_mode"),
    KeyRule(_crop, "buckets square_crop random_crop"),
    KeyRule(_video, "num_frames auto_frame_count shrink_video_to_frames fps do_i2v"),
    KeyRule(_mask, "mask_path mask_min_value"),
    KeyRule(_repeats, "num_repeats"),
    KeyRule(_turns, "is_reg"),
    KeyRule(_weight, "is_reg loss_multiplier"),
    *read_elsewhere("""
        cache_text_embeddings trim_auto_frame_count_tail controls control_path control_path_1 control_path_2
        control_path_3 full_size_control_images control_transparent_color
    """),
    *UNSUPPORTED_DATASET_KEYS,
    *UNUSED_DATASET_KEYS,
)
"""Its paths are relative to one of `datasets` of a `RunConfig`."""


def put_controls(dataset: EntryAtResolution, free: int) -> None:
    """Put an entry's reference folders as datasets, from index `free` of the list on."""
    entry = dataset.entry
    kind = entry.job.target.arch.references if entry.controls_in_own_shape else "reference_strict"
    own_size = kind == "reference_loose" and not entry.job.target.match_target_res
    names = [f"{dataset.id}-control-{position}" for position in range(1, len(entry.controls) + 1)]
    for position, (name, (key, folder)) in enumerate(zip(names, entry.controls, strict=True)):
        values = {
            "id": name,
            "path": folder,
            "dataset_type": "conditioning",
            "conditioning_type": kind,
            "source_dataset_id": dataset.id,
            "resolution": CONTROL_RESOLUTION if own_size else dataset.resolution,
        }
        root: Path = ("datasets", free + position)
        for field, value in values.items():
            entry.put((*root, field), value, key)
        put_storage(entry, root)
        put_latents(entry, root)
    if names:
        entry.block.assign((*dataset.root, "conditioning"), names, "control_path")
