"""The keys of an entry of ai-toolkit's `datasets` that have no effect here or are not supported."""

from __future__ import annotations

from dataclasses import dataclass

from gracetune.config.dialects.aitoolkit.sections import HARMLESS
from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.table import IsFalse, OneOf, noted, rejected

UNUSED_DATASET_KEYS = (
    *noted(
        HARMLESS,
        """
        num_workers prefetch_factor pin_memory cache_latents_num_workers cache_tensors_to_disk cache_clip_vision_to_disk
        load_image_when_caching_latents fast_image_size debug
        """,
        IsFalse(),
    ),
    # Upstream sets these itself, or reads them only together with an option that is rejected below.
    *noted(
        HARMLESS,
        """
        diff_output_preservation diff_output_preservation_class random_triggers_max guidance_type
        clip_image_augmentations clip_image_shuffle_augmentations num_controls_from_same_folder
        augmentation_cache_epoch bucket_tolerance do_audio audio_preserve_pitch audio_normalize
        """,
        IsFalse(),
    ),
)


@dataclass(frozen=True)
class _OnlyWithoutBuckets(OneOf):
    """Also holds unless `buckets` is false: upstream reads the key only then."""

    def holds(self, block: PeerBlock, name: str) -> bool:
        return block.get("buckets") is not False or super().holds(block, name)


_NO_IMAGE_INPUT = "nothing: no model of ours takes such images"
_SIZES = "sizes and buckets follow from the resolution"

UNSUPPORTED_DATASET_KEYS = (
    rejected("random_triggers", OneOf(([], "")), "nothing: captions get one trigger word"),
    rejected("replacements", OneOf(([],)), "nothing: captions are taken as they are"),
    rejected("token_dropout_rate", OneOf((0,)), "0: only whole captions are dropped"),
    rejected("use_short_captions", OneOf((False,)), "false: each image has one caption"),
    rejected("random_scale", _OnlyWithoutBuckets((False,)), f"false: {_SIZES}"),
    rejected("scale", OneOf((1,)), f"1: {_SIZES}"),
    rejected("max_pixels_per_frame", OneOf((None,)), f"nothing: {_SIZES}"),
    rejected("poi", OneOf((None,)), "nothing: images are not cut around a point"),
    rejected("augments", OneOf(([],)), "nothing: list them under `augmentations`"),
    rejected("shuffle_augmentations", OneOf((False,)), "false: augmentations are applied in their order"),
    rejected("replay_transforms", OneOf((True,)), "true: references are flipped with their image"),
    rejected("standardize_images", OneOf((False,)), "false: images stay as they are"),
    rejected("extra_values", OneOf(([],)), "nothing: adapters that take extra values are not trained here"),
    rejected("inpaint_path", OneOf((None,)), _NO_IMAGE_INPUT),
    rejected("unconditional_path", OneOf((None,)), _NO_IMAGE_INPUT),
    rejected("clip_image_path", OneOf((None,)), _NO_IMAGE_INPUT),
    rejected("clip_image_from_same_folder", OneOf((False,)), _NO_IMAGE_INPUT),
    rejected("control_from_same_folder", OneOf((False,)), "false: give the references in control_path"),
)
