"""The keys of one dataset entry in SimpleTuner's `multidatabackend.json`. Facts of release 4.10.1."""

from __future__ import annotations

from typing import Any

from gracetune.config.dialects.simpletuner.values import (
    Converter,
    as_flag,
    as_given,
    as_number,
    choice,
    inverse,
    names,
    not_zero,
)
from gracetune.config.draft import Path


def _or_nothing(value: Any) -> Any:
    return 0 if value == "" or value is False else as_number(value)


def _ids(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _probability(value: Any) -> Any:
    return as_number(value) or 1.0


ROWS: dict[str, tuple[Path, Converter]] = {
    "id": (("id",), as_given),
    "cache_dir_vae": (("cache_dir",), as_given),
    "resolution": (("resolution",), as_number),
    "resolution_type": (("resolution_type",), as_given),
    "minimum_image_size": (("minimum_size",), _or_nothing),
    "maximum_image_size": (("maximum_size",), not_zero),
    "target_downsample_size": (("downsample_to",), not_zero),
    "minimum_aspect_ratio": (("minimum_aspect_ratio",), not_zero),
    "maximum_aspect_ratio": (("maximum_aspect_ratio",), not_zero),
    "crop": (("crop", "enabled"), as_flag),
    "crop_style": (("crop", "style"), choice({"centre": "center"})),
    "crop_aspect": (("crop", "aspect"), as_given),
    "caption_strategy": (("captions", "strategy"), choice({"instance_prompt": "instanceprompt"})),
    "instance_prompt": (("captions", "instance_prompt"), as_given),
    "prepend_instance_prompt": (("captions", "prepend_instance_prompt"), as_flag),
    "disable_multiline_split": (("captions", "split_lines"), inverse),
    "repeats": (("repeats",), _or_nothing),
    "probability": (("probability",), _probability),
    "max_num_samples": (("max_samples",), not_zero),
    "train_batch_size": (("batch_size",), as_number),
    "start_epoch": (("start_epoch",), as_number),
    "start_step": (("start_step",), as_number),
    "end_epoch": (("end_epoch",), not_zero),
    "end_step": (("end_step",), not_zero),
    "slider_strength": (("adapter_strength",), as_number),
    "is_regularisation_data": (("regularisation",), as_flag),
    "is_regularization_data": (("regularisation",), as_flag),
    "conditioning_data": (("conditioning",), _ids),
    "source_dataset_id": (("source_dataset_id",), as_given),
}
"""Key -> path inside the dataset, converter."""

INHERITED = (
    "resolution", "resolution_type", "minimum_image_size", "maximum_image_size", "target_downsample_size",
    "caption_strategy", "instance_prompt", "prepend_instance_prompt", "only_instance_prompt", "vae_cache_disable",
)  # fmt: skip
"""Options of the whole config that a dataset takes where it does not say otherwise."""

HANDLED = (
    "type", "dataset_type", "disabled", "disable", "instance_data_dir", "instance_data_root", "crop_aspect_buckets",
    "only_instance_prompt", "caption_shuffle", "caption_file_extensions", "vae_cache_clear_each_epoch",
    "vae_cache_disable", "disable_vae_cache", "conditioning_type", "in_memory", "video", "audio", "parquet", "csv_file",
    "csv_cache_dir", "csv_caption_column", "csv_url_column",
)  # fmt: skip

HARMLESS = names("""
    vae_cache_ondemand vae_batch_size read_batch_size write_batch_size image_processing_batch_size max_workers
    hash_filenames shorten_filenames csv_hash_filenames csv_shorten_filenames compress_cache skip_file_discovery
    preserve_data_backend_cache delete_unwanted_images delete_problematic_images delete_nsfw_images scan_for_errors
    text_embeds image_embeds conditioning_image_embeds cache_file_suffix metadata_backend metadata_update_interval
    vae_cache_scan_behaviour auto_generated ignore_epochs disable_validation text_cache_ondemand text_cache_disable
    text_encoder_batch_size conditioning_image_embed_batch_size cache_dir_conditioning_image_embeds
    metadata_clone_source_id memory_filesystem_path memory_filesystem_size memory_filesystem_sudo default
    bucket_strategy
""")

REFUSED: dict[str, tuple[Any, str]] = {
    "conditioning": (None, "conditioning images are not generated; name a dataset of them in conditioning_data"),
    "conditioning_config": (None, "conditioning images are not generated; add a dataset of them"),
    "grounding": (None, "grounding is not implemented"),
    "grounding_data": (None, "grounding is not implemented"),
    "s2v_datasets": (None, "speech-to-video is not supported"),
    "data_generator": (None, "captions are not generated"),
    "max_upscale_threshold": (None, "filter by minimum_image_size instead"),
    "timestep_sampling_offset": (0.0, "all datasets draw timesteps alike"),
    "split_composite_images": (False, "split the images before training"),
    "composite_image_column": (None, "split the images before training"),
    "disable_after_epoch_step": (None, "end a dataset with end_step or end_epoch"),
    "caption_filter_list": (None, "captions are not filtered; edit them"),
    "shuffle": (True, "samples are always shuffled"),
    "distillation_type": (None, "distillation is not implemented"),
    "filter_func": (None, "samples are not filtered by code"),
}
"""Key -> its default, why not."""

ELSEWHERE = names("""
    dataset_name dataset_config data_files split revision image_column video_column audio_column huggingface cache_dir
    streaming num_proc auto_load aws aws_bucket_name aws_data_prefix aws_region_name aws_endpoint_url aws_access_key_id
    aws_secret_access_key aws_session_token aws_max_pool_connections webshart source metadata hf_token subfolder
    shard_cache_gb parallel_downloads buffer_size max_file_size webshart_optimize_captions webshart_optimise_captions
    audio_min_duration_seconds audio_max_duration_seconds audio_channels audio_bucket_strategy audio_duration_interval
    audio_duration_interval_seconds audio_bucket_interval audio_truncation_mode truncation_mode audio_only
    target_resolution lyrics_extension lyrics_suffix lyrics_filename_format
""")
"""Keys of storage we do not read, or written beside the block they belong in: without effect on a local folder."""

KNOWN = frozenset((*ROWS, *HANDLED, *HARMLESS, *REFUSED, *ELSEWHERE))

VIDEO_ROWS: dict[str, tuple[str, Converter]] = {
    "num_frames": ("num_frames", as_number),
    "min_frames": ("min_frames", as_number),
    "max_frames": ("max_frames", as_number),
    "fps": ("fps", as_number),
    "is_i2v": ("image_to_video", as_flag),
    "bucket_strategy": ("bucket_strategy", as_given),
    "frame_interval": ("frame_interval", as_number),
}
AUDIO_ROWS: dict[str, tuple[str, Converter]] = {
    "sample_rate": ("sample_rate", as_number),
    "channels": ("channels", as_number),
    "duration_interval": ("duration_interval", as_number),
    "max_duration_seconds": ("max_duration_seconds", as_number),
    "truncation_mode": ("truncation", as_given),
}
AUDIO_REFUSED: dict[str, tuple[Any, str]] = {
    "min_duration_seconds": (None, "short clips are not left out; take them out of the folder"),
    "auto_split": (False, "sound is not taken out of videos"),
    "source_from_video": (False, "sound is not taken out of videos"),
    "audio_only": (False, "audio datasets hold audio alone anyway"),
}
AUDIO_HARMLESS = (
    "bucket_strategy", "allow_zero_audio", "target_resolution", "lyrics_extension", "lyrics_suffix",
    "lyrics_filename_format", "cache_dir", "source_dataset_id",
)  # fmt: skip
AUDIO_FROM_OPTIONS = {
    "audio_max_duration_seconds": "max_duration_seconds",
    "audio_channels": "channels",
    "audio_duration_interval": "duration_interval",
    "audio_truncation_mode": "truncation",
}
TABLE_ROWS: dict[str, tuple[str, Converter]] = {
    "path": ("path", as_given),
    "filename_column": ("filename_column", as_given),
    "caption_column": ("caption_column", as_given),
    "fallback_caption_column": ("fallback_caption_column", as_given),
    "width_column": ("width_column", as_given),
    "height_column": ("height_column", as_given),
    "identifier_includes_extension": ("identifier_includes_extension", as_flag),
}
TABLE_REFUSED: dict[str, tuple[Any, str]] = {
    "identifier_prefix": (None, "file names are matched as the table has them"),
    "default_extension": (None, "file names are matched as the table has them"),
    "bbox_column": (None, "grounding is not implemented"),
}
TABLE_HARMLESS = (
    "engine", "id_column", "aspect_ratio_column", "fps_column", "num_frames_column", "audio_channels_column",
    "audio_duration_column", "audio_num_samples_column", "audio_sample_rate_column", "lyrics_column",
)  # fmt: skip
SHUFFLE_KEYS = ("enable", "count", "seed", "split_on", "position_start", "include_original")
SEPARATORS = {"comma": ",", "space": " ", "period": "."}
IN_MEMORY_KEYS = ("compression", "num_workers", "memory_limit_gb", "file_extensions")
