"""Reads the `datasets` list. Each resolution of an entry becomes a dataset, and so does each of its control folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from gracetune.config.dialects.aitoolkit.dataset_parts import DATASET, DatasetEntry, EntryAtResolution, put_controls
from gracetune.config.dialects.aitoolkit.job import AiToolkitJob
from gracetune.config.dialects.aitoolkit.keys import HARMLESS
from gracetune.config.dialects.peer_file import PeerBlock, block_at
from gracetune.config.dialects.table import apply, check
from gracetune.config.dialects.values import as_number, whole
from gracetune.config.spelling import misspelt
from gracetune.config.url_credentials import split_address

UPSTREAM_RESOLUTION = 512
STORAGES = ("local", "in_memory")


def read_datasets(process: PeerBlock, job: AiToolkitJob) -> None:
    entries = [_entry(block, job) for block in _blocks(process)]
    _text_cache(entries, job)
    if job.target.names.explicit_sizes:
        process.default(("model", "size_conditioning"), "bucket")
    if any(entry.block.get("buckets") is not False for entry in entries):
        process.default(("training", "fill_batches"), True)
    datasets = _datasets(entries)
    process.draft.entries = [
        tuple(at for at, dataset in enumerate(datasets) if dataset.entry is entry) for entry in entries
    ] or None  # fmt: skip
    for dataset in datasets:
        block = dataset.entry.block
        apply(block, DATASET, dataset, dataset.root)
        if job.target.edits:  # so that a missing value is reported under this key
            block.default((*dataset.root, "conditioning"), [], block.key("control_path"))
    # Control folders come after the datasets themselves, so that these keep the order of the file.
    free = len(datasets)
    for dataset in datasets:
        put_controls(dataset, free)
        free += len(dataset.entry.controls)
    if entries:
        differences = ", ".join(_differences(entries, job))
        process.note(f"on purpose not as in ai-toolkit: {differences}; see docs/fidelity.md")


def _differences(entries: list[DatasetEntry], job: AiToolkitJob) -> Iterator[str]:
    """Yield how gracetune deliberately differs from ai-toolkit, with ai-toolkit's way in parentheses."""
    yield "images are scaled with Lanczos (there bicubic)"
    yield "transparent areas become white, and colour profiles are applied"
    yield "latents are the mean of the VAE's distribution (there a sample)"
    yield "batches are put together anew in every epoch, of a random dataset and bucket (there shuffled as they are)"
    if job.target.names.spaces_count:
        yield "captions keep their spaces (there a second one follows each comma)"
    if any(entry.block.get("mask_path") or entry.block.get("alpha_mask") for entry in entries):
        yield "masks are not blurred at random, and images without one count fully (there not, beside others with one)"
    if any(entry.random_crop for entry in entries):
        yield "a random crop is chosen again whenever latents are encoded"
    if any(entry.random_crop and entry.block.get("buckets") is False for entry in entries):
        yield "images smaller than the square are enlarged (there others take their place)"
    if any(entry.trigger is not None for entry in entries):
        yield "a trigger word inside another word does not count as present (there it does)"


def _datasets(entries: list[DatasetEntry]) -> list[EntryAtResolution]:
    taken: set[str] = set()
    found = [(entry, resolution, key) for entry in entries for resolution, key in _resolutions(entry.block)]
    return [
        EntryAtResolution(entry, _id(entry.block, resolution, taken), resolution, key, ("datasets", index))
        for index, (entry, resolution, key) in enumerate(found)
    ]


def _blocks(process: PeerBlock) -> list[PeerBlock]:
    """Return the entries of `datasets`, or of `dataset` as in the ai-toolkit fork, which can be a single entry."""
    name, single = "datasets", process.get("dataset")
    if single is not None and process.get("datasets") is not None:
        process.problem("dataset", "one of `dataset` and `datasets`", "move it into `datasets`")
    elif single is not None and not isinstance(single, list):
        return [process.inner("dataset")]
    elif single is not None:
        name = "dataset"
    value, key = process.get(name), process.key(name)
    if isinstance(value, list) and value:
        return [block_at(process.reading, item, f"{key}[{index}]") for index, item in enumerate(value)]
    hint = "for example `datasets: [{folder_path: /data/images, resolution: [1024]}]`"
    process.problem(name, "a list with at least one dataset", hint)
    # The problem is reported, and a placeholder keeps the schema from reporting it again.
    process.assign(("datasets",), [{"id": "missing", "path": "missing"}], name)
    return []


def _entry(block: PeerBlock, job: AiToolkitJob) -> DatasetEntry:
    check(block, DATASET)
    from_length = block.flag("auto_frame_count", False)
    frames = block.get("num_frames")
    video = from_length or (frames is not None and whole(as_number(frames)) != 1)
    own = block if block.get("trigger_word") is not None else job.process
    entry = DatasetEntry(
        block=block,
        job=job,
        trigger=own.get("trigger_word"),
        trigger_key=own.key("trigger_word"),
        is_reg=block.flag("is_reg", False),
        caches_text=job.caches_text or block.flag("cache_text_embeddings", False),
        video=video,
        whole_clip=block.flag("shrink_video_to_frames", True) and not from_length,
        from_length=from_length,
        image_to_video=_image_to_video(block, job, video),
        caching=_caching(block),
        random_crop=block.flag("random_crop", False),
        storage=_storage(block),
        controls=_controls(block, job),
        controls_in_own_shape=block.flag("full_size_control_images", True),
    )
    _report(block, entry)
    return entry


def _storage(block: PeerBlock) -> str | None:
    """Return the storage that `type` names, or None. Upstream's only type is `image`; the others are our extension."""
    kind = block.get("type")
    if kind is None or kind == "image":
        return None
    if kind in STORAGES:
        return str(kind)
    hint = misspelt(kind, STORAGES, write="type: {}")
    block.reject("type", f"image, or {' or '.join(STORAGES)}", hint)
    return None


def _image_to_video(block: PeerBlock, job: AiToolkitJob, video: bool) -> bool:
    """Whether clips are trained from their first frame."""
    requested, mode = block.flag("do_i2v", False), job.target.arch.starts_from_image
    if mode != "do_i2v" and block.get("do_i2v") is not None:
        block.list_unused(HARMLESS, "do_i2v")  # the web interface writes it for every model
    return video and (mode == "always" or (mode == "do_i2v" and requested))


def _caching(block: PeerBlock) -> str | None:
    on_disk = block.flag("cache_latents_to_disk", False)
    in_memory = block.flag("cache_latents", False)
    caching = "disk" if on_disk else "memory" if in_memory else None
    mode = block.get("augmentations_cache_mode")
    if caching and block.get("augmentations") and mode in (None, "disable_cache"):
        name = "cache_latents_to_disk" if on_disk else "cache_latents"
        block.note(
            f"{block.key(name)}: off because of `augmentations`, as in ai-toolkit; write `augmentations_cache_mode: "
            "static` (augmented once) or `refresh_each_epoch` to cache them"
        )
        return None
    return caching


def _controls(block: PeerBlock, job: AiToolkitJob) -> tuple[tuple[str, Any], ...]:
    """Return key and folder of each reference. The web interface writes the numbered keys, which take precedence."""
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
    if folders and job.target.arch.references is None:
        why = "nothing: this model takes no references; the edit models do"
        block.draft.reject(folders[0][0], folders[0][1], why)
        return ()
    return tuple(folders)


def _report(block: PeerBlock, entry: DatasetEntry) -> None:
    if block.get("controls"):
        block.reject("controls", "nothing: depth, pose and line images are not made here")
    if block.get("control_transparent_color") not in (None, [0, 0, 0]):
        block.reject("control_transparent_color", "[0, 0, 0]: transparent parts of references become black")
    if block.get("fps") is not None and (not entry.video or entry.whole_clip):
        block.list_unused(HARMLESS, "fps")  # frames are spread over the whole clip, or there is only one
    if entry.from_length and not block.flag("trim_auto_frame_count_tail", True):
        block.reject("trim_auto_frame_count_tail", "true: the tail that does not fit is cut off, not squeezed in")
    _report_captions(block, entry)
    if block.get("keep_tokens") and block.get("shuffle_tokens"):
        block.note(f"{block.key('keep_tokens')}: these tags stay in front here; ai-toolkit shuffles them too")
    extension = block.get("caption_ext")
    if isinstance(extension, str) and extension.lstrip(".").lower() == "json":
        block.reject("caption_ext", "txt: one caption a file, as plain text")


def _report_captions(block: PeerBlock, entry: DatasetEntry) -> None:
    job_word, own = entry.job.process.get("trigger_word"), block.get("trigger_word")
    if own and job_word and own != job_word and not entry.caches_text:
        key = block.key("trigger_word")
        block.note(f"{key}: takes the place of the job's `{job_word}`; ai-toolkit puts both in front of a caption")
    if entry.job.one_prompt and block.get("caption_dropout_rate"):
        block.list_unused(HARMLESS, "caption_dropout_rate")  # all captions are the same, and none is dropped


def _text_cache(entries: list[DatasetEntry], job: AiToolkitJob) -> None:
    """Record which key asks for cached text embeddings. They are always cached; this sets the origin of the value."""
    asking = [entry.block for entry in entries if entry.block.flag("cache_text_embeddings", False)]
    if entries and job.caches_text:
        asking.append(job.train)
    if asking:
        asking[0].assign(("cache", "text_cache_type"), "disk", "cache_text_embeddings")


def _resolutions(block: PeerBlock) -> list[tuple[Any, str]]:
    value, key = block.get("resolution"), block.key("resolution")
    if isinstance(value, list) and value:
        return [(as_number(item), f"{key}[{index}]") for index, item in enumerate(value)]
    return [(UPSTREAM_RESOLUTION if value is None else as_number(value), key)]


def _id(block: PeerBlock, resolution: Any, taken: set[str]) -> str:
    """Return an id of folder name and resolution that is unique in the file and the same in every run of it."""
    folder = block.get("dataset_path") or block.get("folder_path")
    folder = split_address(folder)[0] if isinstance(folder, str) else folder
    name = PurePosixPath(folder.replace("\\", "/")).name.removesuffix(".json") if isinstance(folder, str) else ""
    stem = f"{name or 'dataset'}-{resolution}" if isinstance(resolution, int | float) else name or "dataset"
    found, copy = stem, 2
    while found in taken:
        found, copy = f"{stem}-{copy}", copy + 1
    taken.add(found)
    return found
