"""The `datasets` list: every resolution of an entry is a dataset of its own, every control folder another one."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from gracetune.config.dialects.aitoolkit.dataset_keys import DATASET
from gracetune.config.dialects.aitoolkit.dataset_parts import Cut, Entry, put_controls, put_dataset
from gracetune.config.dialects.aitoolkit.keys import PEER, Block, Reading, block_of, check, number, whole
from gracetune.config.dialects.aitoolkit.model import Target
from gracetune.config.dialects.aitoolkit.train import Training
from gracetune.config.spelling import misspelt

UPSTREAM_RESOLUTION = 512
STORAGES = ("local", "in_memory")


def read_datasets(reading: Reading, process: Block, target: Target, training: Training) -> None:
    entries = [_entry(reading, block, process, target, training) for block in _blocks(reading, process)]
    _text_cache(reading, entries)
    names: set[str] = set()
    cuts = [
        Cut(entry, _id(entry.block, resolution, names), resolution, key)
        for entry in entries
        for resolution, key in _resolutions(entry.block)
    ]
    for index, cut in enumerate(cuts):
        put_dataset(reading, cut, ("datasets", index))
        if target.edits:  # named so where it is missed
            key = cut.entry.block.key("control_path")
            reading.draft.default(("datasets", index, "conditioning"), [], PEER, key)
    # After the datasets themselves, so that these keep the order of the file.
    free = len(cuts)
    for index, cut in enumerate(cuts):
        put_controls(reading, cut, ("datasets", index), free)
        free += len(cut.entry.controls)


def _blocks(reading: Reading, process: Block) -> list[Block]:
    """`datasets`, or the forks' `dataset` with its single entry."""
    value, key = process.get("datasets"), process.key("datasets")
    single, single_key = process.get("dataset"), process.key("dataset")
    if single is not None and value is not None:
        reading.draft.problem(single_key, single, "one of `dataset` and `datasets`", "move it into `datasets`")
    elif single is not None and not isinstance(single, list):
        return [block_of(reading, single, single_key)]
    elif single is not None:
        value, key = single, single_key
    if isinstance(value, list) and value:
        return [block_of(reading, item, f"{key}[{index}]") for index, item in enumerate(value)]
    hint = "for example `datasets: [{folder_path: /data/images, resolution: [1024]}]`"
    reading.draft.problem(key, value, "a list with at least one dataset", hint)
    # Said already: a stand-in keeps the schema from saying it again.
    reading.put(("datasets",), [{"id": "missing", "path": "missing"}], key)
    return []


def _entry(reading: Reading, block: Block, process: Block, target: Target, training: Training) -> Entry:
    check(reading, block, DATASET)
    from_length = block.flag(reading, "auto_frame_count", False)
    frames = block.get("num_frames")
    video = from_length or (frames is not None and whole(number(frames)) != 1)
    own = block if block.get("trigger_word") is not None else process
    entry = Entry(
        block=block,
        target=target,
        training=training,
        trigger=own.get("trigger_word"),
        trigger_key=own.key("trigger_word"),
        is_reg=block.flag(reading, "is_reg", False),
        video=video,
        whole_clip=block.flag(reading, "shrink_video_to_frames", True) and not from_length,
        from_length=from_length,
        image_to_video=_image_to_video(reading, block, target, video),
        caching=_caching(reading, block),
        random_crop=block.flag(reading, "random_crop", False),
        storage=_storage(reading, block),
        controls=_controls(reading, block, target),
        controls_in_own_shape=block.flag(reading, "full_size_control_images", True),
    )
    _say(reading, entry)
    return entry


def _storage(reading: Reading, block: Block) -> str | None:
    """`image` is upstream's only kind of folder; where its files are read from is ours to say."""
    kind = block.get("type")
    if kind is None or kind == "image":
        return None
    if kind in STORAGES:
        return str(kind)
    hint = misspelt(kind, STORAGES, write="type: {}")
    reading.draft.refuse(block.key("type"), kind, f"image, or {' or '.join(STORAGES)}", hint)
    return None


def _image_to_video(reading: Reading, block: Block, target: Target, video: bool) -> bool:
    asked, mode = block.flag(reading, "do_i2v", False), target.arch.starts_from_image
    if mode != "do_i2v" and block.get("do_i2v") is not None:
        reading.harmless.append(block.key("do_i2v"))  # the web interface writes it for every model
    return video and (mode == "always" or (mode == "do_i2v" and asked))


def _caching(reading: Reading, block: Block) -> str | None:
    on_disk = block.flag(reading, "cache_latents_to_disk", False)
    in_memory = block.flag(reading, "cache_latents", False)
    caching = "disk" if on_disk else "memory" if in_memory else None
    mode = block.get("augmentations_cache_mode")
    if caching and block.get("augmentations") and mode in (None, "disable_cache"):
        name = "cache_latents_to_disk" if on_disk else "cache_latents"
        reading.draft.note(
            f"{block.key(name)}: off because of `augmentations`, as in ai-toolkit; write `augmentations_cache_mode: "
            "static` (augmented once) or `refresh_each_epoch` to cache them"
        )
        return None
    return caching


def _controls(reading: Reading, block: Block, target: Target) -> tuple[tuple[str, Any], ...]:
    """Key and folder of each reference. The numbered keys are the web interface's and win upstream."""
    folders = [
        (block.key(name), block.get(name))
        for name in ("control_path_1", "control_path_2", "control_path_3")
        if block.get(name)
    ]
    value, key = block.get("control_path"), block.key("control_path")
    if not folders and isinstance(value, list):
        folders = [(f"{key}[{index}]", item) for index, item in enumerate(value)]
    elif not folders and value:
        folders = [(key, value)]
    if folders and target.arch.references is None:
        why = "nothing: this model takes no references; the edit models do"
        reading.draft.refuse(folders[0][0], folders[0][1], why)
        return ()
    return tuple(folders)


def _say(reading: Reading, entry: Entry) -> None:
    block, draft = entry.block, reading.draft
    if block.get("controls"):
        why = "nothing: depth, pose and line images are not made here"
        draft.refuse(block.key("controls"), block.get("controls"), why)
    if block.get("control_transparent_color") not in (None, [0, 0, 0]):
        why = "[0, 0, 0]: transparent parts of references become black"
        draft.refuse(block.key("control_transparent_color"), block.get("control_transparent_color"), why)
    if block.get("fps") is not None and (not entry.video or entry.whole_clip):
        reading.harmless.append(block.key("fps"))  # frames are spread over the whole clip, or there is only one
    if entry.from_length and not block.flag(reading, "trim_auto_frame_count_tail", True):
        why = "true: the tail that does not fit is cut off, not squeezed in"
        draft.refuse(block.key("trim_auto_frame_count_tail"), False, why)
    if block.get("keep_tokens") and block.get("shuffle_tokens"):
        draft.note(f"{block.key('keep_tokens')}: these tags stay in front here; ai-toolkit shuffles them too")
    extension = block.get("caption_ext")
    if isinstance(extension, str) and extension.lstrip(".").lower() == "json":
        draft.refuse(block.key("caption_ext"), extension, "txt: one caption a file, as plain text")


def _text_cache(reading: Reading, entries: list[Entry]) -> None:
    """Text embeddings are always cached here; a file that asks for it gets to see where."""
    asking = [entry.block for entry in entries if entry.block.flag(reading, "cache_text_embeddings", False)]
    asking += [entry.training.block for entry in entries if entry.training.caches_text]
    if asking:
        reading.put(("cache", "text_cache_type"), "disk", asking[0].key("cache_text_embeddings"))


def _resolutions(block: Block) -> list[tuple[Any, str]]:
    value, key = block.get("resolution"), block.key("resolution")
    if isinstance(value, list) and value:
        return [(number(item), f"{key}[{index}]") for index, item in enumerate(value)]
    return [(UPSTREAM_RESOLUTION if value is None else number(value), key)]


def _id(block: Block, resolution: Any, taken: set[str]) -> str:
    """Folder name and resolution: the same in every run of the same file, and unlike all others in it."""
    folder = block.get("dataset_path") or block.get("folder_path")
    name = PurePosixPath(folder.replace("\\", "/")).name.removesuffix(".json") if isinstance(folder, str) else ""
    stem = f"{name or 'dataset'}-{resolution}" if isinstance(resolution, int | float) else name or "dataset"
    found, copy = stem, 2
    while found in taken:
        found, copy = f"{stem}-{copy}", copy + 1
    taken.add(found)
    return found
