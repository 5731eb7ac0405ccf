"""One dataset entry of SimpleTuner's, read into one of our datasets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gracetune.config.dialects.simpletuner import dataset_keys as keys
from gracetune.config.dialects.simpletuner.gh200 import known_block, put_in_memory
from gracetune.config.dialects.simpletuner.model import is_image_to_video
from gracetune.config.dialects.simpletuner.values import (
    PEER,
    Converter,
    Options,
    as_flag,
    as_list,
    as_number,
    is_number,
    is_off,
)
from gracetune.config.draft import Draft, Path
from gracetune.config.families import find_flavour
from gracetune.config.spelling import misspelt

_CAPTION_DROPOUT = 0.1
_TRAINED = ("image", "video", "audio")
_SECONDS = 5
_WAN_FPS = 15


@dataclass
class DatasetReader:
    """Reads entry after entry; remembers which keys had nothing to say, for one note about all of them."""

    options: Options
    draft: Draft
    family: str
    backend: Options | None = None
    """A top-level `data_backend` that says how every dataset is kept."""

    def __post_init__(self) -> None:
        self.harmless: list[str] = []
        self.count = 0

    def read(self, entry: Options) -> None:
        if not self._storage_is_ours(entry):
            return
        here: Path = ("datasets", self.count)
        self.count += 1
        for name, (inner, convert) in keys.ROWS.items():
            source = entry if name in entry or name not in keys.INHERITED else self.options
            source.put(self.draft, name, (*here, *inner), convert)
        if "id" not in entry:
            self.draft.missing((*here, "id"), entry.key("id"), "a name of its own", 'add "id": "my-images"')
        self._report(entry)
        self._sizes(entry, here)
        kind = self._kind(entry, here)
        self._place(entry, here)
        self._crop(entry, here)
        self._captions(entry, here, kind)
        self._caches(entry, here)
        self._conditioning(entry, here)
        if kind == "video" or (kind == "conditioning" and "video" in entry):
            self._video(entry, here)
        if kind == "audio":
            self._audio(entry, here)
        unused = {*keys.ROWS, *keys.HANDLED} - entry.used
        self.harmless += [name for name in entry.values if name in unused and not is_off(entry.get(name))]

    def _report(self, entry: Options) -> None:
        for name in entry.values:
            if name not in keys.KNOWN:
                expected = "a key of a dataset (SimpleTuner would ignore this one)"
                entry.problem(self.draft, name, expected, misspelt(name, keys.KNOWN))
            elif name in keys.REFUSED:
                refuse(entry, self.draft, name, keys.REFUSED)
            elif name in keys.ELSEWHERE or (name in keys.HARMLESS and not is_off(entry.get(name))):
                self.harmless.append(name)

    def _sizes(self, entry: Options, here: Path) -> None:
        pair = {"maximum_image_size": "maximum_size", "target_downsample_size": "downsample_to"}
        given = [name for name, field in pair.items() if self.draft.get((*here, field)) is not None]
        if len(given) == 1:
            other = next(name for name in pair if name not in given)
            source = entry if given[0] in entry else self.options
            source.problem(self.draft, given[0], f"`{other}` next to it", f"add `{other}`, or remove `{given[0]}`")
            self.draft.put((*here, pair[given[0]]), None, source.origin(given[0]))

    def _kind(self, entry: Options, here: Path) -> str:
        kind = entry.get("dataset_type") or "image"
        entry.put(self.draft, "dataset_type", (*here, "dataset_type"))
        return str(kind)

    def _place(self, entry: Options, here: Path) -> None:
        if self._said_storage(entry).get("type") == "csv":
            self._csv(entry, here)
            return
        folder = "instance_data_dir" if "instance_data_dir" in entry else "instance_data_root"
        entry.put(self.draft, folder, (*here, "path"), _only_folder)
        self._said_storage(entry).put(self.draft, "type", (*here, "type"))
        self._in_memory(entry, here)
        if (*here, "path") not in self.draft.origins:
            self.draft.missing((*here, "path"), entry.key("instance_data_dir"), "the dataset's folder",
                               'add "instance_data_dir": "/path/to/images"')  # fmt: skip

    def _said_storage(self, entry: Options) -> Options:
        return entry if "type" in entry or self.backend is None else self.backend

    def _storage_is_ours(self, entry: Options) -> bool:
        """Data we cannot reach is one problem, whatever else its entry says."""
        said = self._said_storage(entry)
        storage = said.get("type")
        if storage is None or storage in _STORAGE:
            return True
        hint = _REMOTE.get(str(storage)) or misspelt(storage, _STORAGE, "choose one of them")
        said.problem(self.draft, "type", f"storage we read: {', '.join(_STORAGE)}", hint)
        return False

    def _csv(self, entry: Options, here: Path) -> None:
        self.draft.put((*here, "type"), "url", self._said_storage(entry).origin("type"))
        entry.put(self.draft, "csv_cache_dir", (*here, "path"))
        if "csv_cache_dir" not in entry:
            self.draft.missing((*here, "path"), entry.key("csv_cache_dir"), "a folder for what is downloaded",
                               'add "csv_cache_dir": "cache/csv"')  # fmt: skip
        table = (*here, "captions", "table")
        entry.put(self.draft, "csv_file", (*table, "path"))
        if "csv_file" not in entry:
            self.draft.missing((*table, "path"), entry.key("csv_file"), "a CSV file of addresses", 'add "csv_file"')
        entry.put(self.draft, "csv_url_column", (*table, "filename_column"))
        entry.put(self.draft, "csv_caption_column", (*table, "caption_column"))
        self.draft.default((*here, "captions", "strategy"), "csv", PEER)

    def _in_memory(self, entry: Options, here: Path) -> None:
        blocks = [known_block(source, self.draft, "in_memory", keys.IN_MEMORY_KEYS)
                  for source in (self.backend, entry) if source is not None]  # fmt: skip
        direct = [self.backend] if self.backend is not None else []
        for block in [*direct, *(block for block in blocks if block is not None)]:
            put_in_memory(block, self.draft, here)

    def _crop(self, entry: Options, here: Path) -> None:
        buckets = entry.get("crop_aspect_buckets")
        if isinstance(buckets, list) and any(isinstance(bucket, Mapping) for bucket in buckets):
            entry.refuse(self.draft, "crop_aspect_buckets", "a list of ratios: all are equally likely",
                         "write [1.0, 0.75, 1.33]")  # fmt: skip
        else:
            path = (*here, "crop", "aspect_buckets")
            entry.put(self.draft, "crop_aspect_buckets", path)
            self.draft.default(path, [], PEER, entry.key("crop_aspect_buckets"))  # named so where it is missed

    def _captions(self, entry: Options, here: Path, kind: str) -> None:
        captions = (*here, "captions")
        only = entry if "only_instance_prompt" in entry else self.options
        if only.switch(self.draft, "only_instance_prompt"):
            self.draft.put((*captions, "strategy"), "instanceprompt", only.origin("only_instance_prompt"))
        self.draft.default((*captions, "strategy"), "filename", PEER, "caption_strategy")
        if self.draft.get((*captions, "strategy")) == "instanceprompt" and not self._prompt(captions):
            self.draft.problem(entry.key("instance_prompt"), None, "a prompt: caption_strategy is instanceprompt",
                               'add "instance_prompt": "a photo of …"', entry.file)  # fmt: skip
        if kind in _TRAINED:
            self.options.put(self.draft, "caption_dropout_probability", (*captions, "dropout"), as_number)
            self.draft.default((*captions, "dropout"), _CAPTION_DROPOUT, PEER, "caption_dropout_probability")
        self._extension(entry, captions)
        self._shuffle(entry, captions)
        self._table(entry, captions)

    def _prompt(self, captions: Path) -> Any:
        return self.draft.get((*captions, "instance_prompt"))

    def _extension(self, entry: Options, captions: Path) -> None:
        names = as_list(entry.get("caption_file_extensions"))
        if isinstance(names, list) and len(names) > 1:
            entry.refuse(self.draft, "caption_file_extensions", "one extension", 'write ["txt"]')
        elif names is not None:
            entry.put(self.draft, "caption_file_extensions", (*captions, "extension"), _first_extension)

    def _shuffle(self, entry: Options, captions: Path) -> None:
        block = known_block(entry, self.draft, "caption_shuffle", keys.SHUFFLE_KEYS)
        if block is None or not block.switch(self.draft, "enable"):
            return
        self.draft.put((*captions, "shuffle_tags"), True, block.origin("enable"))
        block.put(self.draft, "count", (*captions, "shuffle_variants"), as_number)
        block.put(self.draft, "position_start", (*captions, "keep_tags"), as_number)
        separator = block.get("split_on")
        if separator in (*keys.SEPARATORS, None):
            block.put(self.draft, "split_on", (*captions, "tag_separator"), lambda name: keys.SEPARATORS[name])
        else:
            block.problem(self.draft, "split_on", f"one of {', '.join(keys.SEPARATORS)}", "write `comma`")
        if as_flag(block.get("include_original")) is False:
            block.refuse(self.draft, "include_original", "the caption as written is one of the variants")

    def _table(self, entry: Options, captions: Path) -> None:
        rows = (*keys.TABLE_ROWS, *keys.TABLE_REFUSED, *keys.TABLE_HARMLESS)
        block = known_block(entry, self.draft, "parquet", rows)
        table = (*captions, "table")
        if block is None:
            if self.draft.get((*captions, "strategy")) == "parquet" and "parquet" not in entry:
                self.draft.missing((*table, "path"), entry.key("parquet"), "a block that names the table",
                                   'add "parquet": {"path": "captions.parquet", "filename_column": …}')  # fmt: skip
            return
        self._rows(block, table, keys.TABLE_ROWS)
        self.draft.default((*table, "identifier_includes_extension"), False, PEER)
        for field in ("caption_column", "filename_column"):
            if field not in block:
                self.options.put(self.draft, f"parquet_{field}", (*table, field))
        for name in keys.TABLE_REFUSED:
            refuse(block, self.draft, name, keys.TABLE_REFUSED)
        self.harmless += [f"parquet.{name}" for name in keys.TABLE_HARMLESS if name in block]

    def _rows(self, block: Options, path: Path, rows: Mapping[str, tuple[str, Converter]]) -> None:
        for name, (field, convert) in rows.items():
            block.put(self.draft, name, (*path, field), convert)

    def _caches(self, entry: Options, here: Path) -> None:
        for name in ("disable_vae_cache", "vae_cache_disable"):
            source = entry if name in entry else self.options
            if source.switch(self.draft, name):
                self.draft.put((*here, "cache_latents"), "none", source.origin(name))
        if entry.switch(self.draft, "vae_cache_clear_each_epoch"):
            origin = entry.origin("vae_cache_clear_each_epoch")
            self.draft.put((*here, "augmentation", "cache_mode"), "refresh_each_epoch", origin)

    def _conditioning(self, entry: Options, here: Path) -> None:
        if entry.get("conditioning_type") in ("controlnet", "segmentation"):
            entry.refuse(self.draft, "conditioning_type", "reference_strict, reference_loose or mask")
        else:
            entry.put(self.draft, "conditioning_type", (*here, "conditioning_type"))
        if not is_off(entry.get("conditioning")):
            self.draft.refused.add((*here, "conditioning"))
        flavour = find_flavour(self.family, str(self.draft.get(("model", "flavour"))))
        if flavour is not None and flavour.edits:
            # named so where it is missed
            self.draft.default((*here, "conditioning"), [], PEER, entry.key("conditioning_data"))

    def _video(self, entry: Options, here: Path) -> None:
        path = (*here, "video")
        block = known_block(entry, self.draft, "video", tuple(keys.VIDEO_ROWS))
        if block is not None:
            self._rows(block, path, keys.VIDEO_ROWS)
        if is_image_to_video(self.draft):
            self.draft.put((*path, "image_to_video"), True, self.options.origin("model_flavour"))
        if self.family == "wan" and self.draft.get((*path, "bucket_strategy")) != "resolution_frames":
            rate = as_number(self.options.get("framerate"))
            frames = int(rate * _SECONDS) if is_number(rate) and 0 < rate < 1000 else _WAN_FPS * _SECONDS
            self.draft.default((*path, "num_frames"), _eight_and_one(frames), PEER, entry.key("video.num_frames"))
        self._fit_frames(entry, path)

    def _fit_frames(self, entry: Options, path: Path) -> None:
        """Wan takes 8k+1 frames in SimpleTuner; another number is rounded down there, and so here."""
        for field in ("num_frames", "min_frames"):
            frames = self.draft.get((*path, field))
            origin = self.draft.origin((*path, field))
            if self.family == "wan" and isinstance(frames, int) and frames > 1 and frames % 8 != 1 and origin:
                fitting = _eight_and_one(frames)
                self.draft.put((*path, field), fitting, origin)
                self.draft.note(f"{origin.key}: {frames} frames become {fitting} (8k+1), as in SimpleTuner")
        if self.draft.get((*path, "num_frames")) is not None:
            frames = self.draft.get((*path, "num_frames"))
            self.draft.default((*path, "min_frames"), frames, PEER, entry.key("video.min_frames"))

    def _audio(self, entry: Options, here: Path) -> None:
        path = (*here, "audio")
        for name, field in keys.AUDIO_FROM_OPTIONS.items():
            self.options.put(self.draft, name, (*path, field), as_number)
        known = (*keys.AUDIO_ROWS, *keys.AUDIO_REFUSED, *keys.AUDIO_HARMLESS)
        block = known_block(entry, self.draft, "audio", known)
        if block is not None:
            self._rows(block, path, keys.AUDIO_ROWS)
            for name in keys.AUDIO_REFUSED:
                refuse(block, self.draft, name, keys.AUDIO_REFUSED)
            self.harmless += [f"audio.{name}" for name in keys.AUDIO_HARMLESS if name in block]


_STORAGE = ("local", "in_memory", "csv")
_REMOTE = {
    "huggingface": "download it (hf download --repo-type dataset NAME), then use type local and instance_data_dir",
    "webshart": "download it, then use type local and instance_data_dir",
    "aws": "copy the bucket to a folder, then use type local and instance_data_dir",
    "memory": "write `in_memory`",
}


def refuse(block: Options, draft: Draft, name: str, table: Mapping[str, tuple[Any, str]]) -> None:
    """Refuse a key that is not at its default."""
    default, why = table[name]
    if not is_off(block.get(name), default):
        block.refuse(draft, name, why)


def _only_folder(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _first_extension(value: Any) -> Any:
    names = as_list(value)
    return names[0].lstrip(".") if isinstance(names, list) and names and isinstance(names[0], str) else value


def _eight_and_one(frames: int) -> int:
    return max(1, (frames - 1) // 8 * 8 + 1)
