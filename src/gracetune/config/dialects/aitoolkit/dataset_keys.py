"""Every key of one entry of ai-toolkit's `datasets`."""

from __future__ import annotations

from gracetune.config.dialects.aitoolkit.keys import Known, Put, Refused, Table, number, refused_unless

_BY_HAND = (
    "folder_path", "dataset_path", "resolution", "caption_ext", "caption_type", "default_caption", "trigger_word",
    "num_frames", "fps", "shrink_video_to_frames", "auto_frame_count", "trim_auto_frame_count_tail", "do_i2v",
    "cache_latents", "cache_latents_to_disk", "cache_text_embeddings", "num_repeats", "is_reg", "loss_multiplier",
    "flip_x", "flip_y", "augmentations", "augmentations_cache_mode", "buckets", "square_crop", "random_crop",
    "mask_path", "control_path", "control_path_1", "control_path_2", "control_path_3", "full_size_control_images",
    "control_transparent_color", "keep_tokens", "controls", "type", "in_memory",
)  # fmt: skip
_HARMLESS = (
    "num_workers", "prefetch_factor", "pin_memory", "cache_latents_num_workers", "cache_tensors_to_disk",
    "cache_clip_vision_to_disk", "load_image_when_caching_latents", "fast_image_size", "debug",
    # upstream sets these itself, or reads them only where something refused below is asked for
    "diff_output_preservation", "diff_output_preservation_class", "random_triggers_max", "guidance_type",
    "clip_image_augmentations", "clip_image_shuffle_augmentations", "num_controls_from_same_folder",
    "augmentation_cache_epoch", "do_audio", "audio_preserve_pitch", "audio_normalize",
)  # fmt: skip
_NO_IMAGE_INPUT = "nothing: no model of ours takes such images"
_SIZES = "sizes and buckets follow from the resolution"

DATASET: Table = {
    **dict.fromkeys(_BY_HAND, Known.BY_HAND),
    **dict.fromkeys(_HARMLESS, Known.HARMLESS),
    "batch_size": Put(("batch_size",), number),
    "network_weight": Put(("adapter_strength",), number),
    "caption_dropout_rate": Put(("captions", "dropout"), number),
    "shuffle_tokens": Put(("captions", "shuffle_tags")),
    "mask_min_value": Put(("mask", "min_weight"), number),
    "alpha_mask": Put(("mask", "from_alpha")),
    "invert_mask": Put(("mask", "invert")),
    "random_triggers": Refused("nothing: captions get one trigger word", ([], "")),
    "replacements": Refused("nothing: captions are taken as they are", ([],)),
    "token_dropout_rate": refused_unless(0, "0: only whole captions are dropped"),
    "use_short_captions": refused_unless(False, "false: each image has one caption"),
    "prior_reg": Put(("regularisation",)),
    "random_scale": refused_unless(False, f"false: {_SIZES}"),
    "scale": refused_unless(1, f"1: {_SIZES}"),
    "bucket_tolerance": refused_unless(64, f"64: {_SIZES}"),
    "max_pixels_per_frame": refused_unless(None, f"nothing: {_SIZES}"),
    "poi": refused_unless(None, "nothing: images are not cut around a point"),
    "augments": Refused("nothing: list them under `augmentations`", ([],)),
    "shuffle_augmentations": refused_unless(False, "false: augmentations are applied in their order"),
    "replay_transforms": refused_unless(True, "true: references are flipped with their image"),
    "standardize_images": refused_unless(False, "false: images stay as they are"),
    "extra_values": Refused("nothing: adapters that take extra values are not trained here", ([],)),
    "inpaint_path": refused_unless(None, _NO_IMAGE_INPUT),
    "unconditional_path": refused_unless(None, _NO_IMAGE_INPUT),
    "clip_image_path": refused_unless(None, _NO_IMAGE_INPUT),
    "clip_image_from_same_folder": refused_unless(False, _NO_IMAGE_INPUT),
    "control_from_same_folder": refused_unless(False, "false: give the references in control_path"),
}
