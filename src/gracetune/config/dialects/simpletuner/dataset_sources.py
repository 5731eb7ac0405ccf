"""Reads the remote sources of SimpleTuner's datasets: the hub, an S3 bucket, archives, a table of URLs.

Each becomes a dataset with a local copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.simpletuner.keys import Off
from gracetune.config.dialects.table import Key, KeyTable, apply, decline_keys, noted, rejected, supported_block
from gracetune.config.dialects.values import as_flag, as_number, whole
from gracetune.config.draft import Path
from gracetune.config.spelling import misspelt

UNUSED: Final = "in datasets, not needed here"
METADATA: Final = "metadata.jsonl"
"""The file in a local copy with the rows of its source (`gracetune.data.copies.rows`)."""
_QUALITY = "quality_assessment"
_MEDIA: Final = {"video": "video_column", "audio": "audio_column"}

HUGGINGFACE: KeyTable[None] = KeyTable(
    *(Key(name) for name in (
        "dataset_name", "split", "revision", "image_column", "video_column", "audio_column", "cache_dir",
        "caption_column", "fallback_caption_column", "description_column", "width_column", "height_column",
        "quality_column", "filter_func", "composite_image_config",
    )),
    *noted("the whole dataset is downloaded before the run, in SimpleTuner too", "streaming",
           unless=Off((None, False))),
    *noted(UNUSED, "num_proc auto_load num_frames_column fps_column file_extension lyrics_column"),
    rejected("audio_caption_fields", Off(), "captions are read from caption_column"),
    rejected("bbox_column", Off(), "grounding is not implemented"),
    expected="a key of the huggingface block",
)  # fmt: skip
FILTER: KeyTable[None] = KeyTable(
    *(Key(name) for name in ("collection", "quality_thresholds", "quality_column", "min_width", "min_height")),
    expected="one of collection, quality_thresholds, quality_column, min_width, min_height",
)
COMPOSITE: KeyTable[None] = KeyTable(
    Key("enabled"),
    Key("image_count", ("count",), as_number),
    Key("select_index", ("index",), as_number),
)
WEBSHART: KeyTable[None] = KeyTable(
    *(Key(name) for name in ("source", "metadata", "subfolder", "cache_dir", "hf_token")),
    *noted(
        UNUSED,
        """
        metadata_cache_dir shard_cache_dir shard_cache_gb parallel_downloads buffer_size max_file_size optimize_captions
        optimise_captions caption_key
        """,
    ),
    expected="a key of the webshart block",
)


def read_hub(entry: PeerBlock, kind: str, path: Path) -> None:
    """Read `type: huggingface`. The entry's own keys override those of its `huggingface` block, as in SimpleTuner."""
    block = supported_block(entry, "huggingface", HUGGINGFACE) or entry.without_nulls({}, entry.key("huggingface"))
    name = _first("dataset_name", entry, block)
    if name is None:
        entry.draft.missing((*path, "path"), entry.key("dataset_name"), "the id of a dataset on the hub",
                            'add "dataset_name": "owner/name"')  # fmt: skip
        return
    revision = _first("revision", entry, block)
    suffix = "" if revision is None else f"@{quote(str(revision.take('revision')), safe='')}"
    name.assign((*path, "path"), f"hf://datasets/{name.take('dataset_name')}{suffix}", "dataset_name")
    copy = (*path, "local_copy")
    media = _MEDIA.get(kind, "image_column")
    for key, field in (("split", "split"), (media, "media_column")):
        source = _first(key, entry, block)
        if source is not None:
            source.put(key, (*copy, field))
    _folder(entry, block, copy)
    _filters(entry, block, copy)
    _composite(block, copy)
    decline_keys(block, HUGGINGFACE)
    _captions_from_columns(entry, block, path, "huggingface")


def read_bucket(entry: PeerBlock, path: Path) -> None:
    """Read `type: aws`: S3 or S3-compatible storage."""
    bucket = entry.take("aws_bucket_name")
    if not isinstance(bucket, str) or not bucket.strip("/ "):
        entry.draft.missing((*path, "path"), entry.key("aws_bucket_name"), "the name of a bucket",
                            'add "aws_bucket_name": "my-bucket"')  # fmt: skip
        return
    prefix = entry.take("aws_data_prefix" if "aws_data_prefix" in entry else "instance_data_dir")
    folder = f"/{prefix.strip('/')}" if isinstance(prefix, str) and prefix.strip("/") else ""
    entry.assign((*path, "path"), f"s3://{bucket.strip('/')}{folder}", "aws_bucket_name")
    storage = (*path, "storage")
    entry.put("aws_endpoint_url", (*storage, "endpoint_url"))
    if entry.get("aws_region_name") not in (None, "", "auto"):
        entry.put("aws_region_name", (*storage, "region"))
    for key in ("access_key_id", "secret_access_key", "session_token"):
        if entry.get(f"aws_{key}"):
            entry.put(f"aws_{key}", (*storage, key))


def read_shards(entry: PeerBlock, path: Path) -> None:
    """Read `type: webshart`: tar archives on the hub, at a URL or in a folder."""
    block = supported_block(entry, "webshart", WEBSHART) or entry.without_nulls({}, entry.key("webshart"))
    source = _first("source", entry, block)
    if source is None:
        entry.draft.missing((*path, "path"), entry.key("source"), "where the archives are",
                            'add "source": "owner/name"')  # fmt: skip
        return
    inside = _first("subfolder", entry, block)
    folder = "" if inside is None else f"/{str(inside.take('subfolder')).strip('/')}"
    source.assign((*path, "path"), _address(str(source.take("source"))) + folder, "source")
    copy = (*path, "local_copy")
    index = _first("metadata", entry, block)
    if index is not None:  # the index has the same subfolders as the archives
        index.assign((*copy, "index"), _address(str(index.take("metadata"))) + folder, "metadata")
    entry.assign((*copy, "format"), "archives", "type")
    token = _first("hf_token", entry, block)
    if token is not None and isinstance(token.get("hf_token"), str):
        token.put("hf_token", (*path, "storage", "token"))
    _folder(entry, block, copy)
    decline_keys(block, WEBSHART)
    _captions_from_columns(entry, block, path, "webshart")


def read_addresses(entry: PeerBlock, path: Path) -> None:
    """Read `type: csv`: a table of URLs and captions."""
    draft, copy = entry.draft, (*path, "local_copy")
    entry.put("csv_file", (*path, "path"))
    if "csv_file" not in entry:
        draft.missing((*path, "path"), entry.key("csv_file"), "a CSV file of addresses", 'add "csv_file"')
    entry.assign((*copy, "format"), "urls", "type")
    entry.put("csv_url_column", (*copy, "media_column"))
    entry.put("csv_cache_dir", (*copy, "folder"))
    if entry.get("caption_strategy") in (None, "csv"):
        _use_table(entry, path, "csv_caption_column")
        if "csv_caption_column" in entry:
            entry.put("csv_caption_column", (*path, "captions", "table", "caption_column"))


def _address(url: str) -> str:
    """Convert a hub id to a URL. A folder or URL is returned unchanged."""
    is_id = url.count("/") == 1 and not url.startswith(("/", ".", "~")) and "://" not in url
    return f"hf://datasets/{url}" if is_id else url


def _first(name: str, *sources: PeerBlock) -> PeerBlock | None:
    return next((source for source in sources if source.get(name) not in (None, "")), None)


def _folder(entry: PeerBlock, block: PeerBlock, copy: Path) -> None:
    source = _first("cache_dir", block, entry)
    if source is not None:
        source.put("cache_dir", (*copy, "folder"))


def _filters(entry: PeerBlock, block: PeerBlock, copy: Path) -> None:
    source = _first("filter_func", block, entry)
    wanted = None if source is None else supported_block(source, "filter_func", FILTER)
    if wanted is None or source is None:
        return
    rows: list[dict[str, Any]] = []
    collection = wanted.take("collection")
    if collection is not None:
        names = [collection] if isinstance(collection, str) else collection
        rows.append({"column": "collection", "one_of": names})
    quality = wanted.take("quality_column") or block.get("quality_column") or _QUALITY
    thresholds = wanted.take("quality_thresholds")
    if isinstance(thresholds, Mapping):
        rows += [{"column": f"{quality}.{key}", "minimum": as_number(value)} for key, value in thresholds.items()]
    elif thresholds is not None:
        wanted.problem("quality_thresholds", "a mapping of scores to their lowest values", 'write {"score": 0.5}')
    for name, column in (("min_width", "width"), ("min_height", "height")):
        if wanted.get(name) is not None:
            rows.append({"column": column, "minimum": as_number(wanted.take(name))})
    if rows:
        source.assign((*copy, "filter"), rows, "filter_func")


def _composite(block: PeerBlock, copy: Path) -> None:
    inner = supported_block(block, "composite_image_config", COMPOSITE)
    if inner is None or as_flag(inner.get("enabled")) is not True:
        return
    if whole(as_number(inner.get("image_count"))) == 1:
        return  # the whole image
    apply(inner, COMPOSITE, None, (*copy, "tile"))
    if "image_count" not in inner:
        inner.problem("image_count", "the number of images side by side", 'add "image_count": 2')


def _captions_from_columns(entry: PeerBlock, block: PeerBlock, path: Path, own: str) -> None:
    """Read the captions of a dataset with columns. SimpleTuner reads them from a column, or uses one prompt for all."""
    strategy = entry.get("caption_strategy")
    if strategy in ("instanceprompt", "instance_prompt"):
        return
    if strategy not in (None, own):
        known = (own, "instanceprompt")
        entry.problem("caption_strategy", f"one of {', '.join(known)}", misspelt(strategy, known, f"write `{own}`"))
        return
    _use_table(entry, path, "caption_strategy")
    table = (*path, "captions", "table")
    columns = _first("caption_column", block, entry)
    if columns is not None:
        columns.put("caption_column", (*table, "caption_column"))
    fallback = _first("fallback_caption_column", block, entry)
    if fallback is not None:
        fallback.put("fallback_caption_column", (*table, "fallback_caption_column"))
    elif block.get("description_column") is not None:
        block.put("description_column", (*table, "fallback_caption_column"))
    if block.get("width_column") is not None and block.get("height_column") is not None:
        block.put("width_column", (*table, "width_column"))
        block.put("height_column", (*table, "height_column"))


def _use_table(entry: PeerBlock, path: Path, name: str) -> None:
    captions = (*path, "captions")
    entry.assign((*captions, "strategy"), "jsonl", name)
    entry.assign((*captions, "table", "path"), METADATA, name)
    entry.assign((*captions, "table", "filename_column"), "file_name", name)
