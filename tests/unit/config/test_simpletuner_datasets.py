"""SimpleTuner's datasets, one entry and one key at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.config import native
from gracetune.config.dataset_config import CaptionTable, Dataset, LocalCopy, RowFilter, Tile
from gracetune.config.dialects.simpletuner.dataset import ENTRY as ENTRY_KEYS
from gracetune.config.dialects.simpletuner.keys import Off
from gracetune.config.dialects.table import Effect
from gracetune.errors import ConfigError
from unit.config.simpletuner_files import DATASETS, problems, resolve

ENTRY: dict[str, Any] = {"id": "a", "instance_data_dir": "data/a"}
TEXTS = DATASETS[1]


def dataset(folder: Path, entry: dict[str, Any], options: dict[str, Any] | None = None) -> Dataset:
    return resolve(folder, options, datasets=[{**ENTRY, **entry}]).config.datasets[0]


def entry_problems(folder: Path, entry: dict[str, Any], options: dict[str, Any] | None = None) -> dict[str, str]:
    found = problems(folder, options, datasets=[{**ENTRY, **entry}])
    return {key: problem.hint for key, problem in found.items()}


@pytest.mark.parametrize(
    ("entry", "path", "expected"),
    [
        ({"instance_data_dir": ["one"]}, "path", "one"),
        ({"instance_data_dir": None, "instance_data_root": "root"}, "path", "root"),
        ({"resolution": 512, "resolution_type": "pixel"}, "resolution", 512),
        ({"resolution": 0.5, "resolution_type": "area"}, "resolution_type", "area"),
        ({"minimum_image_size": "256"}, "minimum_size", 256),
        ({"crop": True, "maximum_image_size": 1024, "target_downsample_size": 768}, "downsample_to", 768),
        ({"crop": True, "maximum_image_size": 1024, "target_downsample_size": 768}, "maximum_size", None),
        ({"maximum_image_size": 1024, "target_downsample_size": 768}, "downsample_to", None),
        ({"maximum_image_size": 0, "target_downsample_size": 0}, "maximum_size", None),
        ({"minimum_aspect_ratio": 0.5, "maximum_aspect_ratio": 2}, "maximum_aspect_ratio", 2),
        ({"crop": True, "crop_style": "centre"}, "crop.style", "center"),
        ({"crop": True, "crop_aspect": "closest", "crop_aspect_buckets": [1, 0.5]}, "crop.aspect_buckets", (1.0, 0.5)),
        ({"caption_strategy": "instance_prompt", "instance_prompt": "x"}, "captions.strategy", "instanceprompt"),
        ({"only_instance_prompt": True, "instance_prompt": "x"}, "captions.strategy", "instanceprompt"),
        ({"instance_prompt": "x", "prepend_instance_prompt": True}, "captions.prepend_instance_prompt", True),
        ({"disable_multiline_split": True}, "captions.split_lines", False),
        ({"caption_file_extensions": [".caption"]}, "captions.extension", "caption"),
        ({"caption_shuffle": {"enable": True, "count": 3}}, "captions.shuffle_variants", 3),
        ({"caption_shuffle": {"enable": True, "position_start": 2}}, "captions.keep_tags", 2),
        ({"caption_shuffle": {"enable": True, "include_original": False}}, "captions.shuffle_written", False),
        ({"caption_shuffle": {"enable": True, "split_on": "period"}}, "captions.tag_separator", "."),
        ({"caption_shuffle": {"enable": False, "count": 3}}, "captions.shuffle_tags", False),
        ({"repeats": "5"}, "repeats", 5),
        ({"repeats": ""}, "repeats", 0),
        ({"max_num_samples": 10}, "max_samples", 10),
        ({"train_batch_size": 2}, "batch_size", 2),
        ({"start_epoch": 2, "end_epoch": 0}, "end_epoch", None),
        ({"start_step": 5, "end_step": 9}, "end_step", 9),
        ({"slider_strength": -0.5}, "adapter_strength", -0.5),
        ({"is_regularisation_data": True}, "regularisation", True),
        ({"is_regularization_data": True}, "regularisation", True),
        ({"vae_cache_clear_each_epoch": True}, "augmentation.cache_mode", "refresh_each_epoch"),
        ({"vae_cache_disable": True}, "cache_latents", "none"),
        ({"disable_vae_cache": True}, "cache_latents", "none"),
        ({"cache_dir_vae": "cache/{id}"}, "cache_dir", "cache/a"),
        ({"type": "in_memory", "in_memory": {"compression": None}}, "in_memory.compression", "none"),
        (
            {"type": "in_memory", "in_memory": {"file_extensions": "jpg,png"}},
            "in_memory.file_extensions",
            ("jpg", "png"),
        ),
    ],
)
def test_values(tmp_path: Path, entry: dict[str, Any], path: str, expected: Any) -> None:
    found: Any = dataset(tmp_path, entry)
    for part in path.split("."):
        found = getattr(found, part)
    assert found == expected


def test_options_of_the_whole_config_fall_into_each_dataset(tmp_path: Path) -> None:
    options = {"resolution": 512, "resolution_type": "pixel", "minimum_image_size": 64, "maximum_image_size": 2048,
               "target_downsample_size": 1024, "caption_strategy": "textfile", "instance_prompt": "p",
               "caption_dropout_probability": 0.2, "vae_cache_disable": True}  # fmt: skip
    found = dataset(tmp_path, {"resolution": 768, "crop": True}, options)
    assert (found.resolution, found.resolution_type, found.minimum_size) == (768, "pixel", 64)
    assert (found.maximum_size, found.downsample_to) == (None, 1024)
    assert (found.captions.strategy, found.captions.instance_prompt, found.captions.dropout) == ("textfile", "p", 0.2)
    assert found.cache_latents == "none"


def test_defaults_are_simpletuners(tmp_path: Path) -> None:
    found = dataset(tmp_path, {})
    assert (found.captions.strategy, found.captions.dropout, found.repeats) == ("filename", 0.1, 0)


def test_captions_are_dropped_in_training_only(tmp_path: Path) -> None:
    datasets = [ENTRY, {"id": "held out", "dataset_type": "eval", "instance_data_dir": "e"}]
    trained, held_out = resolve(tmp_path, datasets=datasets).config.datasets
    assert (trained.captions.dropout, held_out.captions.dropout) == (0.1, 0.0)


def test_a_table_of_captions(tmp_path: Path) -> None:
    block = {"path": "t.parquet", "filename_column": "file", "caption_column": "text", "width_column": "w"}
    entry = {"caption_strategy": "parquet", "metadata_backend": "parquet", "parquet": block}
    table = dataset(tmp_path, entry).captions.table
    assert table is not None
    assert (table.path, table.filename_column, table.caption_column) == ("t.parquet", "file", "text")
    assert table.identifier_includes_extension is False
    options = {"parquet_caption_column": "c"}
    table = dataset(tmp_path, {**entry, "parquet": {"path": "t.parquet"}}, options).captions.table
    assert table is not None
    assert table.caption_column == "c"


def test_addresses_in_a_csv(tmp_path: Path) -> None:
    entry = {"id": "urls", "type": "csv", "csv_file": "u.csv", "csv_cache_dir": "got", "csv_url_column": "url",
             "csv_caption_column": "text", "caption_strategy": "csv"}  # fmt: skip
    found = resolve(tmp_path, datasets=[entry]).config.datasets[0]
    assert (found.type, found.path, found.captions.strategy) == ("local", "u.csv", "jsonl")
    assert found.local_copy == LocalCopy(folder="got", format="urls", media_column="url")
    assert found.captions.table == table("text")


def test_a_dataset_of_the_hub(tmp_path: Path) -> None:
    entry = {"id": "hub", "type": "huggingface", "dataset_name": "a/b", "revision": "refs/pr/1", "split": "train[:9]",
             "image_column": "picture", "metadata_backend": "huggingface", "caption_strategy": "huggingface",
             "cache_dir": "got", "huggingface": {
                 "caption_column": ["short", "meta.long"], "fallback_caption_column": "tags", "width_column": "w",
                 "height_column": "h", "num_proc": 4, "streaming": True,
                 "composite_image_config": {"enabled": True, "image_count": 4, "select_index": 1},
                 "filter_func": {"collection": "photo", "quality_thresholds": {"clip": 0.3}, "min_width": 512},
             }}  # fmt: skip
    resolved = resolve(tmp_path, datasets=[entry])
    found = resolved.config.datasets[0]
    assert (found.type, found.path) == ("local", "hf://datasets/a/b@refs%2Fpr%2F1")
    assert found.local_copy == LocalCopy(
        folder="got", split="train[:9]", media_column="picture", tile=Tile(count=4, index=1),
        filter=(RowFilter(column="collection", one_of=("photo",)),
                RowFilter(column="quality_assessment.clip", minimum=0.3), RowFilter(column="width", minimum=512)),
    )  # fmt: skip
    assert found.captions.strategy == "jsonl"
    assert found.captions.table == table(
        ("short", "meta.long"), fallback_caption_column="tags", width_column="w", height_column="h"
    )
    assert any("streaming" in note and "before the run" in note for note in resolved.notes)


def test_a_dataset_of_the_hub_with_one_prompt_or_clips(tmp_path: Path) -> None:
    entry = {"id": "hub", "type": "huggingface", "dataset_name": "a/b"}
    prompted = {**entry, "caption_strategy": "instanceprompt", "instance_prompt": "sks"}
    found = resolve(tmp_path, datasets=[prompted]).config.datasets[0]
    assert (found.captions.strategy, found.captions.table, found.local_copy) == ("instanceprompt", None, None)
    clips = {**entry, "dataset_type": "video", "huggingface": {"video_column": "clip", "image_column": "still",
                                                               "caption_column": "prompt"}}  # fmt: skip
    found = resolve(tmp_path, datasets=[clips]).config.datasets[0]
    assert found.local_copy == LocalCopy(media_column="clip")
    assert found.captions.table == table("prompt")
    named = {**entry, "caption_column": "text"}  # where SimpleTuner's own documentation writes it
    assert resolve(tmp_path, datasets=[named]).config.datasets[0].captions.table == table("text")


def test_a_bucket(tmp_path: Path) -> None:
    entry = {"id": "s3", "type": "aws", "aws_bucket_name": "pets", "aws_data_prefix": "/cats/",
             "aws_region_name": "auto", "aws_endpoint_url": "https://storage.example",
             "aws_access_key_id": "AKIAEXAMPLEEXAMPLE", "aws_secret_access_key": "very-secret",
             "caption_strategy": "textfile"}  # fmt: skip
    resolved = resolve(tmp_path, datasets=[entry])
    found = resolved.config.datasets[0]
    assert (found.type, found.path, found.captions.strategy) == ("local", "s3://pets/cats", "textfile")
    assert found.storage is not None
    assert (found.storage.endpoint_url, found.storage.region) == ("https://storage.example", None)
    assert found.storage.secret_access_key == "very-secret"
    shown = native.show(resolved.config, resolved.origins, resolved.redactor)
    assert not any(secret in shown + repr(resolved) for secret in ("very-secret", "AKIAEXAMPLEEXAMPLE"))


def test_archives(tmp_path: Path) -> None:
    entry = {"id": "tars", "type": "webshart", "source": "a/b", "subfolder": "data", "hf_token": "hf_secret",
             "webshart": {"cache_dir": "got", "shard_cache_gb": 3}}  # fmt: skip
    found = resolve(tmp_path, datasets=[entry]).config.datasets[0]
    assert (found.type, found.path) == ("local", "hf://datasets/a/b/data")
    assert found.local_copy == LocalCopy(folder="got", format="archives")
    assert found.storage is not None
    assert found.storage.token is not None
    assert found.captions.table == CaptionTable(path="metadata.jsonl", filename_column="file_name")
    folder = resolve(tmp_path, datasets=[{**entry, "source": "/data/tars", "hf_token": None}]).config.datasets[0]
    assert (folder.path, folder.storage) == ("/data/tars/data", None)
    indexed = resolve(tmp_path, datasets=[{**entry, "metadata": "c/d"}]).config.datasets[0]
    assert indexed.local_copy == LocalCopy(folder="got", format="archives", index="hf://datasets/c/d/data")


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ({"type": "huggingface"}, "[0].dataset_name"),
        ({"type": "aws"}, "[0].aws_bucket_name"),
        ({"type": "webshart"}, "[0].source"),
        ({"type": "csv"}, "[0].csv_file"),
        ({"type": "huggingface", "dataset_name": "a/b", "caption_strategy": "textfile"}, "[0].caption_strategy"),
        ({"type": "huggingface", "dataset_name": "a/b", "huggingface": {"splitt": "x"}}, "[0].huggingface.splitt"),
        ({"type": "huggingface", "dataset_name": "a/b", "huggingface": {"filter_func": {"min_w": 1}}},
         "[0].huggingface.filter_func.min_w"),
        ({"type": "huggingface", "dataset_name": "a/b",
          "huggingface": {"composite_image_config": {"enabled": True}}},
         "[0].huggingface.composite_image_config.image_count"),
    ],
)  # fmt: skip
def test_remote_data_that_is_not_named_well(tmp_path: Path, entry: dict[str, Any], key: str) -> None:
    assert list(problems(tmp_path, datasets=[{"id": "x", **entry}])) == [key]


def table(caption_column: Any, **more: Any) -> CaptionTable:
    return CaptionTable(path="metadata.jsonl", filename_column="file_name", caption_column=caption_column, **more)


def test_video(tmp_path: Path) -> None:
    block = {"num_frames": 81, "min_frames": 97, "max_frames": 200, "is_i2v": True, "frame_interval": 5,
             "bucket_strategy": "resolution_frames"}  # fmt: skip
    video = dataset(tmp_path, {"dataset_type": "video", "video": block}).video
    assert (video.num_frames, video.min_frames, video.max_frames, video.frame_interval) == (81, 97, 200, 5)
    assert (video.image_to_video, video.bucket_strategy) == (True, "resolution_frames")


def test_frames_are_counted_as_simpletuner_counts_them(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, datasets=[{**ENTRY, "dataset_type": "video", "video": {"num_frames": 75}}])
    video = resolved.config.datasets[0].video
    assert (video.num_frames, video.min_frames) == (73, 73)
    assert any("75 frames become 73" in note for note in resolved.notes)
    assert dataset(tmp_path, {"dataset_type": "video"}).video.num_frames == 73
    assert dataset(tmp_path, {"dataset_type": "video"}, {"framerate": 24}).video.num_frames == 113


def test_image_to_video_flavours_train_image_to_video(tmp_path: Path) -> None:
    found = dataset(tmp_path, {"dataset_type": "video"}, {"model_flavour": "i2v-14b-2.1"})
    assert found.video.image_to_video


def test_audio(tmp_path: Path) -> None:
    options = {"model_family": "stable_audio", "model_flavour": ..., "audio_channels": 2, "audio_duration_interval": 4}
    block = {"sample_rate": 44100, "max_duration_seconds": 30, "truncation_mode": "random", "duration_interval": 5}
    audio = dataset(tmp_path, {"dataset_type": "audio", "audio": block}, options).audio
    assert (audio.sample_rate, audio.channels, audio.duration_interval) == (44100, 2, 5)
    assert (audio.max_duration_seconds, audio.truncation) == (30, "random")


def test_edit_pairs(tmp_path: Path) -> None:
    options = {"model_family": "qwen_image", "model_flavour": "edit-v2"}
    pair = [{**ENTRY, "conditioning_data": ["before"]},
            {"id": "before", "dataset_type": "conditioning", "conditioning_type": "reference_strict",
             "source_dataset_id": "a", "instance_data_dir": "b"}]  # fmt: skip
    target, source = resolve(tmp_path, options, datasets=pair).config.datasets
    assert (target.conditioning, source.conditioning_type, source.source_dataset_id) == (
        ("before",),
        "reference_strict",
        "a",
    )


def test_several_references_are_used_together_or_rejected(tmp_path: Path) -> None:
    others = [{"id": name, "dataset_type": "conditioning", "conditioning_type": "reference_loose",
               "instance_data_dir": name} for name in ("b", "c")]  # fmt: skip
    datasets = [{**ENTRY, "conditioning_data": ["b", "c"]}, *others]
    assert list(problems(tmp_path, datasets=datasets)) == ["conditioning_multidataset_sampling"]
    resolve(tmp_path, {"conditioning_multidataset_sampling": "combined"}, datasets=datasets)
    others[1]["conditioning_type"] = "mask"
    resolve(tmp_path, datasets=datasets)


def test_uniform_sampling_matters_with_more_than_one_dataset(tmp_path: Path) -> None:
    options = {"data_backend_sampling": "uniform"}
    assert resolve(tmp_path, options, datasets=[ENTRY]).config.training.dataset_weights == "size"
    two = [ENTRY, {**ENTRY, "id": "b"}]
    assert resolve(tmp_path, options, datasets=two).config.training.dataset_weights == "equal"
    assert resolve(tmp_path, {}, datasets=two).config.training.dataset_weights == "size"
    assert list(problems(tmp_path, {"data_backend_sampling": "evenly"}, datasets=two)) == ["data_backend_sampling"]


def test_a_dataset_with_slider_strength_0_is_left_out(tmp_path: Path) -> None:
    """SimpleTuner multiplies the adapter by 0 for its batches, so all their gradients are 0."""
    three = [{**ENTRY, "slider_strength": 0.5}, {**ENTRY, "id": "b", "slider_strength": 0}, {**ENTRY, "id": "c"}]
    resolved = resolve(tmp_path, {}, datasets=three)
    assert [(one.disabled, one.adapter_strength, one.turn) for one in resolved.config.datasets] == [
        (False, 0.5, 0), (True, 1.0, 2), (False, 1.0, 2),
    ]  # fmt: skip
    assert any("slider_strength: 0" in note for note in resolved.notes)


def test_a_dataset_with_probability_0_is_not_trained_on(tmp_path: Path) -> None:
    two = [ENTRY, {**ENTRY, "id": "b", "probability": 0}, {**ENTRY, "id": "c", "probability": "0.5"}]
    resolved = resolve(tmp_path, {}, datasets=two)
    assert [(one.disabled, one.probability) for one in resolved.config.datasets] == [
        (False, 1.0), (True, 1.0), (False, 0.5)
    ]  # fmt: skip
    assert any("probability: 0" in note for note in resolved.notes)


def test_where_embeddings_are_cached(tmp_path: Path) -> None:
    embeds = [TEXTS, {"id": "more", "dataset_type": "text_embeds", "cache_dir": "other"},
              {"id": "images", "dataset_type": "image_embeds", "cache_dir": "cache/images"}]  # fmt: skip
    resolved = resolve(tmp_path, {"cache_dir_vae": "cache/vae"}, datasets=[ENTRY, *embeds])
    cache = resolved.config.cache
    assert (cache.text_cache_dir, cache.vae_cache_dir, cache.text_cache_type) == ("cache/text/wan", "cache/vae", "disk")
    unused = [note.partition(":")[0] for note in resolved.notes if "nothing is kept there" in note]
    assert unused == ["[2].cache_dir", "[3].cache_dir"]
    memory = {"id": "t", "dataset_type": "text_embeds", "type": "memory", "text_encoder_batch_size": 8}
    cache = resolve(tmp_path, datasets=[ENTRY, memory]).config.cache
    assert (cache.text_cache_type, cache.text_encoder_batch_size) == ("memory", 8)


def test_two_default_text_embeds(tmp_path: Path) -> None:
    found = problems(tmp_path, datasets=[ENTRY, TEXTS, {**TEXTS, "id": "again"}])
    assert list(found) == ["[2].default"]
    assert "again" in found["[2].default"].hint


def test_duplicate_ids_are_named_as_the_file_names_them(tmp_path: Path) -> None:
    assert list(problems(tmp_path, datasets=[ENTRY, ENTRY])) == ["[1].id"]


def test_disabled_entries_are_not_read_and_are_mentioned(tmp_path: Path) -> None:
    off = {"id": "off", "type": "huggingface", "disabled": True, "no such key": 1}
    resolved = resolve(tmp_path, datasets=[ENTRY, off, {"id": "off too", "type": "aws", "disable": True}])
    assert [found.id for found in resolved.config.datasets] == ["a"]
    assert any("(off) is disabled" in note for note in resolved.notes)
    assert list(problems(tmp_path, datasets=[{**ENTRY, "disabled": True}])) == ["data_backend_config"]


@pytest.mark.parametrize("storage", ["memory", "locall", 3])
def test_storage_we_do_not_read_is_one_problem(tmp_path: Path, storage: Any) -> None:
    entry = {"type": storage, "dataset_name": "x", "caption_strategy": "huggingface", "huggingface": {}}
    found = entry_problems(tmp_path, entry)
    assert list(found) == ["[0].type"]
    assert storage != "locall" or found["[0].type"] == "write `local`"


@pytest.mark.parametrize(
    ("entry", "key", "hint"),
    [
        ({"crop_styl": "random"}, "[0].crop_styl", "crop_style"),
        ({"in_memory": {"compresion": "lz4"}}, "[0].in_memory.compresion", "compression"),
        ({"type": "in_memory", "in_memory": {"compression": "gzip"}}, "[0].in_memory.compression", "compression"),
        ({"dataset_type": "video", "video": {"frames": 3}}, "[0].video.frames", "num_frames"),
        ({"caption_shuffle": {"enable": True, "split_on": "dash"}}, "[0].caption_shuffle.split_on", "comma"),
        ({"caption_strategy": "parquet"}, "[0].parquet", "parquet"),
        ({"caption_strategy": "instanceprompt"}, "[0].instance_prompt", "instance_prompt"),
        ({"instance_data_dir": None}, "[0].instance_data_dir", "instance_data_dir"),
        ({"instance_data_dir": ["a", "b"]}, "[0].instance_data_dir", "instance_data_dir"),
        ({"id": None}, "[0].id", '"id"'),
        ({"dataset_type": "vidoe"}, "[0].dataset_type", "video"),
        ({"dataset_type": "caption"}, "[0].dataset_type", ""),
        ({"conditioning_type": "controlnet"}, "[0].conditioning_type", ""),
        ({"crop": True, "crop_aspect_buckets": [{"aspect_bucket": 1}]}, "[0].crop_aspect_buckets", "[1.0"),
        ({"maximum_image_size": 2048}, "[0].maximum_image_size", "target_downsample_size"),
        ({"crop": True, "crop_aspect": "closest"}, "[0].crop_aspect_buckets", "[1.0"),
        ({"disabled": "perhaps"}, "[0].disabled", "true or false"),
        ({"timestep_sampling_offset": 0.5}, "[0].timestep_sampling_offset", ""),
        ({"parquet": {"path": "t", "identifier_prefix": "x/"}}, "[0].parquet.identifier_prefix", ""),
        ({"repeats": -1}, "[0].repeats", ""),
        ({"caption_file_extensions": ["txt", "md"]}, "[0].caption_file_extensions", "txt"),
    ],
)
def test_mistakes_and_rejections(tmp_path: Path, entry: dict[str, Any], key: str, hint: str) -> None:
    found = entry_problems(tmp_path, entry)
    assert key in found
    assert hint in found[key]


@pytest.mark.parametrize("entries", [3, {"id": "a"}, ["a"], [None], []])
def test_a_list_that_is_none(tmp_path: Path, entries: Any) -> None:
    assert len(problems(tmp_path, datasets=entries)) == 1


@pytest.mark.parametrize("name", sorted(ENTRY_KEYS.names(Effect.REJECTED)))
def test_keys_we_do_not_do_are_rejected_when_set(tmp_path: Path, name: str) -> None:
    off, why = ENTRY_KEYS.keys[name].unless, ENTRY_KEYS.keys[name].note
    assert isinstance(off, Off)
    default = off.defaults[0]
    value = False if default is True else ["something"]
    assert list(entry_problems(tmp_path, {name: value})) == [f"[0].{name}"]
    dataset(tmp_path, {name: default})
    assert why


CONTEXTS: dict[str, dict[str, Any]] = {
    "image": {"instance_data_dir": "x"},
    "video": {"dataset_type": "video", "instance_data_dir": "x"},
    "csv": {"type": "csv", "csv_file": "a", "csv_cache_dir": "b", "caption_strategy": "csv"},
    "conditioning": {"dataset_type": "conditioning", "instance_data_dir": "x"},
}


@pytest.mark.parametrize("name", sorted(ENTRY_KEYS))
def test_no_key_is_dropped_in_silence(tmp_path: Path, name: str) -> None:
    """Nonsense in a key that is read must be noticed; where it has no say, a note must name it."""
    for context, around in CONTEXTS.items():
        entry = {"id": "b", **around, name: {"nonsense": True}}
        try:
            notes = resolve(tmp_path, datasets=[ENTRY, entry]).notes
            keys = [word.strip(",:").rpartition(".")[2] for note in notes for word in note.split()]
            assert name in keys, context
        except ConfigError as error:
            assert any(f".{name}" in problem.key for problem in error.problems), context


def test_a_choice_of_samples_is_a_note(tmp_path: Path) -> None:
    entries = [{"id": "a", "type": "local", "instance_data_dir": str(tmp_path)}]
    for most, stated in ((10, True), (0, False), (None, False)):
        notes = resolve(tmp_path, datasets=[{**entries[0], "max_num_samples": most}]).notes
        assert any("max_num_samples" in one for one in notes) is stated


HUB = {"id": "a", "type": "huggingface", "dataset_name": "a/b"}


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ({"caption_shuffle": {"enable": True, "count": 3}}, ["caption_shuffle"]),
        ({"caption_shuffle": {"enable": False, "count": 3}}, []),
        (HUB, ["description"]),
        ({**HUB, "caption_strategy": "instanceprompt", "instance_prompt": "x"}, []),
        ({**HUB, "caption_column": "text"}, ["description", "caption_column"]),
        ({**HUB, "huggingface": {"caption_column": "text", "description_column": "more"}}, []),
    ],
)
def test_differences_that_apply_are_named(tmp_path: Path, entry: dict[str, Any], found: list[str]) -> None:
    notes = resolve(tmp_path, {}, datasets=[{**ENTRY, **entry}]).notes
    (named,) = [note for note in notes if note.startswith("on purpose not as in SimpleTuner")]
    keys = ("caption_shuffle", "description", "caption_column")
    assert {key for key in keys if f"`{key}`" in named} == set(found)
