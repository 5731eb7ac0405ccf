"""Keys of a dataset entry in SimpleTuner's `multidatabackend.json`, as of release 4.10.1.

These are the keys that correspond to one value each, those without an effect here, and those that are not supported.
"""

from __future__ import annotations

from typing import Any

from gracetune.config.dialects.simpletuner.keys import Off
from gracetune.config.dialects.table import Key, KeyTable, noted, rejected
from gracetune.config.dialects.values import as_flag, as_number, choice, inverse, positive_or_none

UNUSED = "in datasets, not needed here"


def _or_nothing(value: Any) -> Any:
    return 0 if value == "" or value is False else as_number(value)


def _ids(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


ROWS = (
    Key("id", ("id",)),
    Key("cache_dir_vae", ("cache_dir",)),
    Key("resolution", ("resolution",), as_number, inherits=True),
    Key("resolution_type", ("resolution_type",), inherits=True),
    Key("minimum_image_size", ("minimum_size",), _or_nothing, inherits=True),
    Key("minimum_aspect_ratio", ("minimum_aspect_ratio",), positive_or_none),
    Key("maximum_aspect_ratio", ("maximum_aspect_ratio",), positive_or_none),
    Key("caption_strategy", ("captions", "strategy"), choice({"instance_prompt": "instanceprompt"}), inherits=True),
    Key("instance_prompt", ("captions", "instance_prompt"), inherits=True),
    Key("prepend_instance_prompt", ("captions", "prepend_instance_prompt"), as_flag, inherits=True),
    Key("disable_multiline_split", ("captions", "split_lines"), inverse),
    Key("repeats", ("repeats",), _or_nothing),
    Key("train_batch_size", ("batch_size",), as_number),
    Key("start_epoch", ("start_epoch",), as_number),
    Key("start_step", ("start_step",), as_number),
    Key("end_epoch", ("end_epoch",), positive_or_none),
    Key("end_step", ("end_step",), positive_or_none),
    Key("is_regularisation_data", ("regularisation",), as_flag),
    Key("is_regularization_data", ("regularisation",), as_flag),
    Key("conditioning_data", ("conditioning",), _ids),
    Key("source_dataset_id", ("source_dataset_id",)),
)
"""Keys that correspond to one value. A key with `inherits` can also be at the top of the config, for all datasets."""
INHERITED = (
    *(key.name for key in ROWS if key.inherits),
    *("only_instance_prompt", "vae_cache_disable", "maximum_image_size", "target_downsample_size"),
)

_KEPT_OTHERWISE = """
    vae_cache_ondemand vae_batch_size read_batch_size write_batch_size image_processing_batch_size max_workers
    hash_filenames shorten_filenames csv_hash_filenames csv_shorten_filenames compress_cache skip_file_discovery
    preserve_data_backend_cache delete_unwanted_images delete_problematic_images delete_nsfw_images scan_for_errors
    text_embeds image_embeds conditioning_image_embeds cache_file_suffix metadata_backend metadata_update_interval
    vae_cache_scan_behaviour auto_generated ignore_epochs disable_validation text_cache_ondemand text_cache_disable
    text_encoder_batch_size conditioning_image_embed_batch_size cache_dir_conditioning_image_embeds
    metadata_clone_source_id memory_filesystem_path memory_filesystem_size memory_filesystem_sudo default
    bucket_strategy
"""
_OTHER_STORAGE = """
    dataset_config data_files streaming num_proc auto_load aws aws_max_pool_connections shard_cache_gb
    parallel_downloads buffer_size max_file_size webshart_optimize_captions webshart_optimise_captions
    audio_min_duration_seconds audio_max_duration_seconds audio_channels audio_bucket_strategy audio_duration_interval
    audio_duration_interval_seconds audio_bucket_interval audio_truncation_mode truncation_mode audio_only
    target_resolution lyrics_extension lyrics_suffix lyrics_filename_format
"""
"""Keys that only affect speed or storage, or that are written beside the block they belong to."""
NOT_USED = (*noted(UNUSED, _KEPT_OTHERWISE, unless=Off()), *noted(UNUSED, _OTHER_STORAGE))

NOT_DONE = (
    rejected("conditioning_config", Off(), "SimpleTuner writes this itself; write `conditioning`"),
    rejected("grounding", Off(), "grounding is not implemented"),
    rejected("grounding_data", Off(), "grounding is not implemented"),
    rejected("s2v_datasets", Off(), "speech-to-video is not supported"),
    rejected("data_generator", Off(), "captions are not generated"),
    rejected("max_upscale_threshold", Off(), "filter by minimum_image_size instead"),
    rejected("timestep_sampling_offset", Off((0.0,)), "timesteps are sampled in the same way for all datasets"),
    rejected("split_composite_images", Off((False,)), "split the images before training"),
    rejected("composite_image_column", Off(), "split the images before training"),
    rejected("disable_after_epoch_step", Off(), "end a dataset with end_step or end_epoch"),
    rejected("caption_filter_list", Off(), "captions are not filtered; edit them"),
    rejected("shuffle", Off((True,)), "samples are always shuffled"),
    rejected("distillation_type", Off(), "distillation is not implemented"),
)

EDGES = ("canny", "edges")
"""SimpleTuner's two names for its Canny edge generator."""
GENERATED: KeyTable[None] = KeyTable(
    rejected("type", Off(EDGES), "no other references are generated"),
    rejected("conditioning_type", Off(("reference_strict", "reference_loose", "controlnet")), "edges are references"),
    Key("low_threshold", ("low_threshold",), as_number),
    Key("high_threshold", ("high_threshold",), as_number),
    *noted("captions of generated references are not used where each image has one reference, as in SimpleTuner",
           "captions caption_strategy instance_prompt"),
    *noted("in datasets, not needed here: generated references are not kept as files", "instance_data_dir"),
    expected="a key of `conditioning` for edges (SimpleTuner would ignore this one)",
)  # fmt: skip
"""The `conditioning` block: references that are generated from the dataset's own images."""

VIDEO: KeyTable[None] = KeyTable(
    Key("num_frames", ("num_frames",), as_number),
    Key("min_frames", ("min_frames",), as_number),
    Key("max_frames", ("max_frames",), as_number),
    *noted(UNUSED, "fps"),  # SimpleTuner prints it and does nothing else with it
    Key("is_i2v", ("image_to_video",), as_flag),
    Key("bucket_strategy", ("bucket_strategy",)),
    Key("frame_interval", ("frame_interval",), as_number),
)
AUDIO: KeyTable[None] = KeyTable(
    Key("sample_rate", ("sample_rate",), as_number),
    Key("channels", ("channels",), as_number),
    Key("duration_interval", ("duration_interval",), as_number),
    Key("max_duration_seconds", ("max_duration_seconds",), as_number),
    Key("truncation_mode", ("truncation",)),
    rejected("min_duration_seconds", Off(), "short clips are not left out; take them out of the folder"),
    rejected("auto_split", Off((False,)), "sound is not taken out of videos"),
    rejected("source_from_video", Off((False,)), "sound is not taken out of videos"),
    rejected("audio_only", Off((False,)), "audio datasets hold audio alone anyway"),
    *noted(
        UNUSED,
        """
        bucket_strategy allow_zero_audio target_resolution lyrics_extension lyrics_suffix lyrics_filename_format
        cache_dir source_dataset_id
        """,
    ),
)
AUDIO_OPTIONS = (
    Key("audio_max_duration_seconds", ("max_duration_seconds",), as_number),
    Key("audio_channels", ("channels",), as_number),
    Key("audio_duration_interval", ("duration_interval",), as_number),
    Key("audio_truncation_mode", ("truncation",)),
)
"""Options of the whole config for audio datasets."""
PARQUET: KeyTable[None] = KeyTable(
    Key("path", ("path",)),
    Key("filename_column", ("filename_column",)),
    Key("caption_column", ("caption_column",)),
    Key("fallback_caption_column", ("fallback_caption_column",)),
    Key("width_column", ("width_column",)),
    Key("height_column", ("height_column",)),
    Key("identifier_includes_extension", ("identifier_includes_extension",), as_flag),
    rejected("identifier_prefix", Off(), "file names are matched as the table has them"),
    rejected("default_extension", Off(), "file names are matched as the table has them"),
    rejected("bbox_column", Off(), "grounding is not implemented"),
    *noted(
        UNUSED,
        """
        engine id_column aspect_ratio_column fps_column num_frames_column audio_channels_column
        audio_duration_column audio_num_samples_column audio_sample_rate_column lyrics_column
        """,
    ),
)
