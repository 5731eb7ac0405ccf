"""Putting one dataset of an ai-toolkit job into the draft, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from gracetune.config.dialects.aitoolkit.dataset_keys import NOT_DONE, NOT_USED
from gracetune.config.dialects.aitoolkit.job import AiToolkitJob
from gracetune.config.dialects.aitoolkit.sections import PEER, section
from gracetune.config.dialects.gh200 import read_in_memory
from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.table import Key, KeyRule, read_elsewhere
from gracetune.config.dialects.values import as_number, real, whole
from gracetune.config.draft import Draft, Origin, Path

CONTROL_RESOLUTION = 1024
"""Upstream scales the references of Qwen-Image-Edit-2509 to this square's area, whatever the target's size."""
UPSTREAM_FPS = 24
LARGEST = 1e12
"""A `maximum_size` that no image exceeds."""
TO_DISK = "cache_latents_to_disk"


@dataclass(frozen=True)
class DatasetEntry:
    """One entry of the list, its switches read once however many resolutions it has."""

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
    """Where latents are kept: `disk`, `memory`, or None where they are encoded anew in every step."""
    random_crop: bool
    storage: str | None
    """Where its files and its references' are read from: `local` or `in_memory`."""
    controls: tuple[tuple[str, Any], ...]
    """Key and folder of each reference."""
    controls_in_own_shape: bool

    def put(self, path: Path, value: Any, key: str) -> None:
        """Put a value that follows from a key that may stand elsewhere in the job."""
        self.block.draft.put(path, value, Origin("file", key, self.block.file))


@dataclass(frozen=True)
class EntryAtResolution:
    """An entry at one of its resolutions: one dataset of ours."""

    entry: DatasetEntry
    id: str
    resolution: Any
    key: str
    root: Path

    @property
    def visits(self) -> Any:
        """Of each file in an epoch; what is no number stays what it was."""
        block = self.entry.block
        repeats = as_number(block.get("num_repeats"))
        flips = 2 ** [block.get(name) for name in ("flip_x", "flip_y")].count(True)
        return flips if repeats is None else max(1, repeats) * flips if whole(repeats) is not None else repeats


def _resolution(block: PeerBlock, cut: EntryAtResolution) -> None:
    cut.entry.put((*cut.root, "id"), cut.id, cut.key)
    if block.get("resolution") is None:
        block.default((*cut.root, "resolution"), cut.resolution)
    else:
        cut.entry.put((*cut.root, "resolution"), cut.resolution, cut.key)


def _buckets(block: PeerBlock, cut: EntryAtResolution) -> None:
    """Images are not enlarged, and the steps of the buckets depend on the model. `bucket_tolerance` has no say."""
    buckets, arch = (*cut.root, "buckets"), cut.entry.job.target.arch
    block.default((*buckets, "rule"), "at_most")
    if arch.bucket_step is not None:
        block.default((*buckets, "multiple"), arch.bucket_step)


def _folder(block: PeerBlock, cut: EntryAtResolution) -> None:
    """`dataset_path` may be a JSON file of captions by path; its images lie next to it."""
    root = cut.root
    name = next((name for name in ("dataset_path", "folder_path") if block.get(name)), None)
    if name is None:
        if not any(problem.key in (block.key_path, block.key("folder_path")) for problem in block.draft.problems):
            block.problem("folder_path", "the folder of the dataset", "add `folder_path`")
        block.assign((*root, "path"), "missing", "folder_path")  # said already: the schema need not say it again
        return
    path = block.get(name)
    if name == "dataset_path" and isinstance(path, str) and path.lower().endswith(".json"):
        block.assign((*root, "path"), str(PurePosixPath(path).parent), name)
        block.assign((*root, "captions", "strategy"), "json", name)
        block.assign((*root, "captions", "table", "path"), path, name)
    else:
        block.assign((*root, "path"), path, name)


def _storage(block: PeerBlock, cut: EntryAtResolution) -> None:
    """The same block as in a SimpleTuner dataset."""
    put_storage(cut.entry, cut.root)


def put_storage(entry: DatasetEntry, root: Path) -> None:
    if entry.storage is not None:
        entry.block.assign((*root, "type"), entry.storage, "type")
    read_in_memory(entry.block, root)


def _captions(block: PeerBlock, cut: EntryAtResolution) -> None:
    entry, captions = cut.entry, (*cut.root, "captions")
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
    _dropped(block, cut)
    _shuffled(block, cut)


def _dropped(block: PeerBlock, cut: EntryAtResolution) -> None:
    """A trigger word is added to dropped captions too: the job's, or where texts are cached the dataset's."""
    entry = cut.entry
    word = entry.trigger if entry.caches_text else entry.job.process.get("trigger_word")
    if isinstance(word, str) and word.strip() and not entry.is_reg:
        block.default((*cut.root, "captions", "dropped_caption"), f"{word} ")


def _shuffled(block: PeerBlock, cut: EntryAtResolution) -> None:
    """Tags come in a new order at every use, or where texts are cached in one order for each item of the list."""
    captions, entry = (*cut.root, "captions"), cut.entry
    block.put("shuffle_tokens", (*captions, "shuffle_tags"))
    if block.get("shuffle_tokens") is not True:
        return
    visits = whole(cut.visits)
    block.default((*captions, "shuffle_variants"), visits if entry.caches_text and visits else "visits")
    block.default((*captions, "shuffle_written"), False)
    if entry.trigger:
        block.default((*captions, "shuffle_trigger"), True)


def _cache(block: PeerBlock, cut: EntryAtResolution) -> None:
    augmentation = (*cut.root, "augmentation")
    put_latents(cut.entry, cut.root)
    if cut.entry.caching is not None:
        # Upstream caches a flipped copy next to the original, so flips alone never switch its cache off.
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


def _crop(block: PeerBlock, cut: EntryAtResolution) -> None:
    crop = (*cut.root, "crop")
    squares = {"square_crop": True, "buckets": False}
    square = next((name for name, value in squares.items() if block.get(name) is value), None)
    cause = square or ("random_crop" if cut.entry.random_crop else None)
    if cause is not None:
        block.assign((*crop, "enabled"), True, cause)
        block.assign((*crop, "aspect"), "square" if square else "preserve", cause)
    if cut.entry.random_crop:
        block.assign((*crop, "style"), "random", "random_crop")
    else:
        block.default((*crop, "style"), "center")
    if cut.entry.random_crop and square == "buckets":
        # Squares are cut out of images of whatever size.
        block.default((*cut.root, "maximum_size"), LARGEST)
        block.default((*cut.root, "downsample_to"), cut.resolution)


def _video(block: PeerBlock, cut: EntryAtResolution) -> None:
    entry, video = cut.entry, (*cut.root, "video")
    if not entry.video:
        return
    name = "auto_frame_count" if entry.from_length else "num_frames"
    block.assign((*cut.root, "dataset_type"), "video", name)
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


def _mask(block: PeerBlock, cut: EntryAtResolution) -> None:
    mask = (*cut.root, "mask")
    if block.get("mask_path") or block.get("alpha_mask") is True:
        block.default((*mask, "normalise"), True)
    if block.get("mask_path"):
        block.put("mask_path", (*mask, "path"))
    elif as_number(block.get("mask_min_value")) == 0.1:
        # the web interface writes it into every job: nobody asked for it
        block.draft.put((*mask, "min_weight"), 0.1, Origin("default", block.key("mask_min_value"), PEER))


def _repeats(block: PeerBlock, cut: EntryAtResolution) -> None:
    """An epoch has every image `num_repeats` times, and as often again for each of its flips."""
    visits, path = cut.visits, (*cut.root, "repeats")
    block.default((*cut.root, "kohya_folders"), False)
    if whole(visits) is None:
        block.put("num_repeats", path, as_number)
    elif block.get("num_repeats") is not None:
        block.assign(path, visits - 1, "num_repeats")
    elif visits > 1:
        block.default(path, visits - 1)


def _turns(block: PeerBlock, cut: EntryAtResolution) -> None:
    if not cut.entry.is_reg:
        return
    block.assign((*cut.root, "even_steps"), True, "is_reg")
    if cut.entry.job.batches_per_step > 1:
        key = cut.entry.job.train.key("gradient_accumulation_steps")
        block.note(
            f"{block.key('is_reg')}: every second optimizer step; with `{key}` ai-toolkit changes at every batch"
        )


def _weight(block: PeerBlock, cut: EntryAtResolution) -> None:
    """Images of `is_reg` are learnt like any other and count `reg_weight` on top of their own multiplier."""
    entry, path = cut.entry, (*cut.root, "loss_weight")
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
    *NOT_DONE,
    *NOT_USED,
)
"""Below one of `datasets` of a `RunConfig`."""


def put_controls(cut: EntryAtResolution, free: int) -> None:
    """An entry's reference folders, from the first free place of the list on."""
    entry = cut.entry
    kind = entry.job.target.arch.references if entry.controls_in_own_shape else "reference_strict"
    own_size = kind == "reference_loose" and not entry.job.target.match_target_res
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
            entry.put((*root, field), value, key)
        put_storage(entry, root)
        put_latents(entry, root)
    if names:
        entry.block.assign((*cut.root, "conditioning"), names, "control_path")
