"""Reads one entry of SimpleTuner's datasets into one of ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gracetune.config.base import LONGEST_SIDE
from gracetune.config.dialects.gh200 import IN_MEMORY, read_in_memory
from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.simpletuner.dataset_keys import (
    AUDIO,
    AUDIO_OPTIONS,
    EDGES,
    GENERATED,
    NOT_DONE,
    NOT_USED,
    PARQUET,
    ROWS,
    UNUSED,
    VIDEO,
)
from gracetune.config.dialects.simpletuner.dataset_sources import (
    read_addresses,
    read_bucket,
    read_hub,
    read_shards,
)
from gracetune.config.dialects.simpletuner.model import is_image_to_video
from gracetune.config.dialects.table import (
    Always,
    Effect,
    Key,
    KeyRule,
    KeyTable,
    apply,
    check,
    decline_keys,
    noted,
    put_row,
    read_elsewhere,
    report_unknown_keys,
    supported_block,
)
from gracetune.config.dialects.values import as_flag, as_list, as_number, choice, is_number, is_off, positive_or_none
from gracetune.config.draft import Path, UnquotedText
from gracetune.config.families import find_flavour, names_of
from gracetune.config.family_names import ClipLength, Flavour
from gracetune.config.spelling import misspelt

_CAPTION_DROPOUT = 0.1
_TRAINED = ("image", "video", "audio")


@dataclass(frozen=True)
class EntryContext:
    """What an entry depends on: the config's options, and the path of its dataset."""

    options: PeerBlock
    family: str
    backend: PeerBlock | None
    """A top-level `data_backend` that sets the storage of every dataset."""
    path: Path = ()
    kind: str = "image"

    def storage(self, entry: PeerBlock) -> PeerBlock:
        """Return the mapping that has the storage options of an entry."""
        return entry if "type" in entry or self.backend is None else self.backend


_STORAGE = ("local", "in_memory", "huggingface", "aws", "csv", "webshart", "url")


def is_reachable(entry: PeerBlock, context: EntryContext) -> bool:
    """Whether the storage of an entry is supported. If not, only that is reported, and the entry is not read."""
    source = context.storage(entry)
    storage = source.get("type")
    if storage is None or storage in _STORAGE:
        return True
    hint = "write `in_memory`" if storage == "memory" else misspelt(storage, _STORAGE, "choose one of them")
    source.problem("type", f"storage we read: {', '.join(_STORAGE)}", hint)
    return False


def _id(entry: PeerBlock, context: EntryContext) -> None:
    if "id" not in entry:
        hint = 'add "id": "my-images"'
        entry.draft.missing((*context.path, "id"), entry.key("id"), "a name of its own", hint)


def _check(entry: PeerBlock, context: EntryContext) -> None:
    check(entry, ENTRY)


_LARGEST, _DOWNSAMPLED = "maximum_image_size", "target_downsample_size"


def _sizes(entry: PeerBlock, context: EntryContext) -> None:
    """Read the sizes for downsampling. SimpleTuner scales every image that is cropped, whatever the maximum size is."""
    sources = {name: entry if name in entry else context.options for name in (_LARGEST, _DOWNSAMPLED)}
    given = [name for name, source in sources.items() if positive_or_none(source.take(name)) is not None]
    if len(given) == 1:
        other = next(name for name in sources if name not in given)
        sources[given[0]].problem(given[0], f"`{other}` next to it", f"add `{other}`, or remove `{given[0]}`")
    if len(given) != 2 or context.kind == "audio":
        return
    keys = " and ".join(source.key(name) for name, source in sources.items())
    if not entry.is_on("crop"):
        entry.note(f"{keys}: no effect without `crop`, as in SimpleTuner")
        return
    sources[_DOWNSAMPLED].put(_DOWNSAMPLED, (*context.path, "downsample_to"), as_number)
    entry.note(f"{keys}: every image is scaled to the latter before it is cropped, as in SimpleTuner")


def _slider(entry: PeerBlock, context: EntryContext) -> None:
    if as_number(entry.get("slider_strength")) == 0:
        entry.assign((*context.path, "disabled"), True, "slider_strength")
        entry.note(
            f"{entry.key('slider_strength')}: 0, which multiplies the adapter by 0, so SimpleTuner learns nothing from "
            f"{entry.get('id')} in its turns; here it is left out. Remove the key to train on it at full strength"
        )
    else:
        entry.put("slider_strength", (*context.path, "adapter_strength"), as_number)


def _probability(entry: PeerBlock, context: EntryContext) -> None:
    value = as_number(entry.get("probability"))
    if value == 0 and is_number(value):
        entry.assign((*context.path, "disabled"), True, "probability")
        entry.note(f"{entry.key('probability')}: 0, so nothing of {entry.get('id')} is trained on, as in SimpleTuner")
    elif value not in (None, ""):
        entry.put("probability", (*context.path, "probability"), as_number)


def _max_samples(entry: PeerBlock, context: EntryContext) -> None:
    if positive_or_none(entry.get("max_num_samples")) is not None:
        entry.put("max_num_samples", (*context.path, "max_samples"), positive_or_none)
        entry.note(f"{entry.key('max_num_samples')}: a random choice that stays the same, but not SimpleTuner's")


def _buckets(entry: PeerBlock, context: EntryContext) -> None:
    if context.kind == "audio":
        return
    buckets, options, names = (*context.path, "buckets"), context.options, names_of(context.family).simpletuner
    entry.default((*buckets, "rule"), "rounded_edge")
    entry.default((*context.path, "kohya_folders"), False)
    options.put("aspect_bucket_rounding", (*buckets, "aspect_decimals"), as_number)
    own = as_number(options.get("aspect_bucket_alignment"))
    alignment = names.alignments.get(str(entry.draft.get(("model", "flavour"))), names.alignment)
    if own is not None and (alignment is None or (names.free_alignment and options.is_on("i_know_what_i_am_doing"))):
        options.take("i_know_what_i_am_doing")
        options.assign((*buckets, "multiple"), own, "aspect_bucket_alignment")
    elif alignment is not None:
        entry.default((*buckets, "multiple"), alignment)
        if own == alignment:
            options.take("aspect_bucket_alignment")
    _smallest_edge(entry, context)


def _smallest_edge(entry: PeerBlock, context: EntryContext) -> None:
    """With square crops, `minimum_image_size` also limits the shorter side."""
    least, kind = (entry.draft.get((*context.path, name)) for name in ("minimum_size", "resolution_type"))
    square = entry.is_on("crop") and entry.get("crop_aspect") in (None, "square")
    if not square or kind == "pixel" or not is_number(least) or not 0 < least < LONGEST_SIDE:
        return
    megapixels = least if kind == "area" else least * least / 1e6
    edge = math.floor(math.sqrt(megapixels * 1e6))
    if edge > 0:
        entry.draft.put((*context.path, "minimum_edge"), edge, entry.draft.origins[(*context.path, "minimum_size")])


def _source(entry: PeerBlock, context: EntryContext) -> None:
    path, source = context.path, context.storage(entry)
    storage = source.take("type")
    if storage in _REMOTE:
        source.assign((*path, "type"), "local", "type")
        _REMOTE[storage](entry, context.kind, path)
        return
    folder = "instance_data_dir" if "instance_data_dir" in entry else "instance_data_root"
    entry.put(folder, (*path, "path"), _only_folder)
    source.put("type", (*path, "type"))
    _in_memory(entry, context)
    if (*path, "path") not in entry.draft.origins:
        entry.draft.missing((*path, "path"), entry.key("instance_data_dir"), "the dataset's folder",
                            'add "instance_data_dir": "/path/to/images"')  # fmt: skip


_REMOTE: dict[str, Callable[[PeerBlock, str, Path], None]] = {
    "huggingface": read_hub,
    "aws": lambda entry, kind, path: read_bucket(entry, path),
    "csv": lambda entry, kind, path: read_addresses(entry, path),
    "webshart": lambda entry, kind, path: read_shards(entry, path),
}


def _only_folder(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _in_memory(entry: PeerBlock, context: EntryContext) -> None:
    backend, path = context.backend, context.path
    if backend is None:
        read_in_memory(entry, path)
        return
    blocks = [supported_block(source, "in_memory", IN_MEMORY) for source in (backend, entry)]
    for block in (backend, *blocks):
        if block is not None:
            apply(block, IN_MEMORY, None, path)


def _crop(entry: PeerBlock, context: EntryContext) -> None:
    """Read the crop. Without `crop` an image keeps its shape, and `crop_style` decides where the excess is cut off."""
    crop = (*context.path, "crop")
    if context.kind == "audio":
        return
    entry.put("crop_style", (*crop, "style"), choice({"centre": "center"}))
    entry.take("crop")
    if not entry.switch("crop"):
        entry.default((*crop, "enabled"), True, entry.key("crop_style"))
        entry.default((*crop, "aspect"), "preserve", entry.key("crop"))
        return
    entry.assign((*crop, "enabled"), True, "crop")
    entry.put("crop_aspect", (*crop, "aspect"))
    buckets = entry.get("crop_aspect_buckets")
    if isinstance(buckets, list) and any(isinstance(bucket, Mapping) for bucket in buckets):
        entry.reject("crop_aspect_buckets", "a list of ratios: all are equally likely", "write [1.0, 0.75, 1.33]")
    else:
        path = (*crop, "aspect_buckets")
        entry.put("crop_aspect_buckets", path)
        entry.default(path, [], entry.key("crop_aspect_buckets"))  # so that a missing value is reported under this key


def _captions(entry: PeerBlock, context: EntryContext) -> None:
    captions = (*context.path, "captions")
    only = entry if "only_instance_prompt" in entry else context.options
    if only.switch("only_instance_prompt"):
        only.assign((*captions, "strategy"), "instanceprompt", "only_instance_prompt")
    entry.default((*captions, "strategy"), "filename", "caption_strategy")
    prompted = entry.draft.get((*captions, "strategy")) == "instanceprompt"
    if prompted and not entry.draft.get((*captions, "instance_prompt")):
        entry.draft.problem(entry.key("instance_prompt"), None, "a prompt: caption_strategy is instanceprompt",
                            'add "instance_prompt": "a photo of …"', entry.file)  # fmt: skip
    if context.kind in _TRAINED:
        context.options.put("caption_dropout_probability", (*captions, "dropout"), as_number)
        entry.default((*captions, "dropout"), _CAPTION_DROPOUT, "caption_dropout_probability")


def _extension(entry: PeerBlock, context: EntryContext) -> None:
    names = as_list(entry.get("caption_file_extensions"))
    if isinstance(names, list) and len(names) > 1:
        entry.reject("caption_file_extensions", "one extension", 'write ["txt"]')
    elif names is not None:
        entry.put("caption_file_extensions", (*context.path, "captions", "extension"), _first_extension)


def _first_extension(value: Any) -> Any:
    names = as_list(value)
    return names[0].lstrip(".") if isinstance(names, list) and names and isinstance(names[0], str) else value


def _shuffle(entry: PeerBlock, context: EntryContext) -> None:
    block = supported_block(entry, "caption_shuffle", SHUFFLE)
    if block is not None and block.switch("enable"):
        captions = (*context.path, "captions")
        apply(block, SHUFFLE, captions, captions)


def _enable(block: PeerBlock, captions: Path) -> None:
    block.assign((*captions, "shuffle_tags"), True, "enable")


_SEPARATORS = {"comma": ",", "space": " ", "period": "."}


def _separator(block: PeerBlock, captions: Path) -> None:
    if block.get("split_on") in (*_SEPARATORS, None):
        block.put("split_on", (*captions, "tag_separator"), lambda name: _SEPARATORS[name])
    else:
        block.problem("split_on", f"one of {', '.join(_SEPARATORS)}", "write `comma`")


SHUFFLE: KeyTable[Path] = KeyTable(
    KeyRule(_enable, "enable"),
    Key("count", ("shuffle_variants",), as_number),
    *noted("captions are shuffled with the run's seed", "seed", unless=Always()),
    Key("split_on"),
    Key("position_start", ("keep_tags",), as_number),
    KeyRule(_separator, "split_on"),
    Key("include_original", ("shuffle_written",), as_flag),
)


def _parquet(entry: PeerBlock, context: EntryContext) -> None:
    captions = (*context.path, "captions")
    table = (*captions, "table")
    block = supported_block(entry, "parquet", PARQUET)
    if block is None:
        if entry.draft.get((*captions, "strategy")) == "parquet" and "parquet" not in entry:
            entry.draft.missing((*table, "path"), entry.key("parquet"), "a block that names the table",
                                'add "parquet": {"path": "captions.parquet", "filename_column": …}')  # fmt: skip
        return
    apply(block, PARQUET, None, table)
    block.default((*table, "identifier_includes_extension"), False)
    for field in ("caption_column", "filename_column"):
        if field not in block:
            context.options.put(f"parquet_{field}", (*table, field))
    decline_keys(block, PARQUET)


def _caches(entry: PeerBlock, context: EntryContext) -> None:
    for name in ("disable_vae_cache", "vae_cache_disable"):
        source = entry if name in entry else context.options
        if source.switch(name):
            source.assign((*context.path, "cache_latents"), "none", name)
    if entry.switch("vae_cache_clear_each_epoch"):
        path = (*context.path, "augmentation", "cache_mode")
        entry.assign(path, "refresh_each_epoch", "vae_cache_clear_each_epoch")


def _conditioning(entry: PeerBlock, context: EntryContext) -> None:
    path = context.path
    if entry.get("conditioning_type") in ("controlnet", "segmentation"):
        entry.reject("conditioning_type", "reference_strict, reference_loose or mask")
    else:
        entry.put("conditioning_type", (*path, "conditioning_type"))
    flavour = find_flavour(context.family, str(entry.draft.get(("model", "flavour"))))
    _generated(entry, context, flavour)
    if flavour is not None and flavour.edits:
        # so that a missing value is reported under this key
        entry.default((*path, "conditioning"), [], entry.key("conditioning_data"))


def _generated(entry: PeerBlock, context: EntryContext, flavour: Flavour | None) -> None:
    """Read references that are generated from the images. They replace those that `conditioning_data` names."""
    given = entry.take("conditioning")
    if not given or is_off(given):
        return
    requested = [given] if isinstance(given, Mapping) else given
    if not isinstance(requested, list) or not all(isinstance(one, Mapping) for one in requested):
        entry.draft.rejected.add((*context.path, "conditioning"))
        entry.problem("conditioning", "a mapping with `type`", 'write {"type": "canny"}')
        return
    path, kinds = context.path, [one.get("type") for one in requested]
    if flavour is not None and not flavour.edits and context.kind == "image":
        entry.note(f"{entry.key('conditioning')}: no effect, because {flavour.name} takes no references")
        return
    if len(kinds) > 1 or kinds[0] not in EDGES or context.kind != "image":
        entry.draft.rejected.add((*path, "conditioning"))
        why = "canny, for images: no other references are generated; name a dataset of them in conditioning_data"
        entry.reject("conditioning", why, found=UnquotedText(f"{', '.join(map(str, kinds))} for {context.kind}s"))
        return
    block = entry.without_nulls(requested[0], _place_of(entry, "conditioning"))
    report_unknown_keys(block, GENERATED)
    edges = (*path, "canny_reference")
    entry.draft.put(edges, {}, block.origin("type"))
    apply(block, GENERATED, None, edges)
    decline_keys(block, GENERATED)
    if "conditioning_data" in entry:
        entry.assign((*path, "conditioning"), [], "conditioning")
        entry.note(f"{entry.key('conditioning_data')}: replaced by what `conditioning` generates, as in SimpleTuner")
    entry.note(f"{entry.key('conditioning')}: edges are trained on as they are; SimpleTuner saves them in the format "
               "of their image first, and JPEG blurs them")  # fmt: skip


def _place_of(entry: PeerBlock, name: str) -> str:
    return f"{entry.key(name)}[0]" if isinstance(entry.get(name), list) else entry.key(name)


def _video(entry: PeerBlock, context: EntryContext) -> None:
    if context.kind != "video" and (context.kind != "conditioning" or "video" not in entry):
        return
    path, family = (*context.path, "video"), context.family
    block = supported_block(entry, "video", VIDEO)
    if block is not None:
        apply(block, VIDEO, None, path)
        decline_keys(block, VIDEO)
    if is_image_to_video(entry, family):
        context.options.assign((*path, "image_to_video"), True, "model_flavour")
    clips = names_of(family).simpletuner.clips
    if clips is not None and entry.draft.get((*path, "bucket_strategy")) != "resolution_frames":
        rate = as_number(context.options.get("framerate"))
        frames = int((rate if is_number(rate) and 0 < rate < 1000 else clips.fps) * clips.seconds)
        entry.default((*path, "num_frames"), clips.rounded_down(frames), entry.key("video.num_frames"))
    _fit_frames(entry, clips, path)


def _fit_frames(entry: PeerBlock, clips: ClipLength | None, path: Path) -> None:
    """Round frame counts down as SimpleTuner does, to a number that the family supports."""
    draft = entry.draft
    for field in ("num_frames", "min_frames"):
        frames, origin = draft.get((*path, field)), draft.origin((*path, field))
        if clips is not None and isinstance(frames, int) and clips.rounded_down(frames) < frames and origin:
            rounded = clips.rounded_down(frames)
            draft.put((*path, field), rounded, origin)
            draft.note(f"{origin.key}: {frames} frames become {rounded} ({clips.frame_step}k+1), as in SimpleTuner")
    if clips is not None:
        entry.default((*path, "frame_step"), clips.frame_step)
    frames = draft.get((*path, "num_frames"))
    if frames is not None:
        entry.default((*path, "min_frames"), frames, entry.key("video.min_frames"))
        least = draft.get((*path, "min_frames"))
        if is_number(least) and is_number(frames) and least < frames:
            entry.default((*path, "allow_shorter"), True, entry.key("video.min_frames"))


def _audio(entry: PeerBlock, context: EntryContext) -> None:
    if context.kind != "audio":
        return
    path = (*context.path, "audio")
    for key in AUDIO_OPTIONS:
        put_row(context.options, key, path)
    block = supported_block(entry, "audio", AUDIO)
    if block is not None:
        apply(block, AUDIO, None, path)
        decline_keys(block, AUDIO)


def _list_unused(entry: PeerBlock, context: EntryContext) -> None:
    unused = {*ENTRY.names(Effect.ACTS)} - entry.used
    entry.list_unused(UNUSED, *(name for name in entry.values if name in unused and not is_off(entry.get(name))))


ENTRY: KeyTable[EntryContext] = KeyTable(
    *ROWS,
    KeyRule(_id, "id"),
    KeyRule(_check),
    KeyRule(_probability, "probability"),
    KeyRule(_slider, "slider_strength"),
    KeyRule(_max_samples, "max_num_samples"),
    KeyRule(_sizes, _LARGEST, _DOWNSAMPLED),
    KeyRule(_buckets),
    Key("dataset_type", ("dataset_type",)),
    KeyRule(
        _source,
        "type instance_data_dir instance_data_root in_memory",
        "dataset_name split revision image_column video_column audio_column caption_column fallback_caption_column",
        "huggingface filter_func cache_dir",
        "aws_bucket_name aws_data_prefix aws_region_name aws_endpoint_url aws_access_key_id aws_secret_access_key",
        "aws_session_token",
        "csv_file csv_cache_dir csv_caption_column csv_url_column",
        "source subfolder metadata hf_token webshart",
    ),
    KeyRule(_crop, "crop crop_style crop_aspect crop_aspect_buckets"),
    KeyRule(_captions, "only_instance_prompt caption_strategy instance_prompt"),
    KeyRule(_extension, "caption_file_extensions"),
    KeyRule(_shuffle, "caption_shuffle"),
    KeyRule(_parquet, "parquet"),
    KeyRule(_caches, "vae_cache_disable disable_vae_cache vae_cache_clear_each_epoch"),
    KeyRule(_conditioning, "conditioning_type conditioning_data conditioning"),
    KeyRule(_video, "video"),
    KeyRule(_audio, "audio"),
    KeyRule(_list_unused),
    *read_elsewhere("disabled disable"),
    *NOT_DONE,
    *NOT_USED,
    expected="a key of a dataset (SimpleTuner would ignore this one)",
)
"""Its paths are relative to one of `datasets` of a `RunConfig`."""
