"""The keys of ai-toolkit's files that have no effect here or are not supported, and what its tables share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.table import IsFalse, Key, KeyRule, KeyTable, OneOf, noted, rejected

PEER = "ai-toolkit"
HARMLESS = "harmless here, and not used"


def section(*entries: Key | KeyRule[Any]) -> KeyTable[Any]:
    """Build the table of one mapping of a job, with ai-toolkit's messages for unknown keys."""
    return KeyTable(
        *entries,
        expected="a key that ai-toolkit knows in {section}",
        otherwise="remove it: ai-toolkit ignores a key it does not know, here it is an error",
    )


# -- datasets ----------------------------------------------------------------------------------------------------------


UNUSED_DATASET_KEYS = (
    *noted(
        HARMLESS,
        """
        num_workers prefetch_factor pin_memory cache_latents_num_workers cache_tensors_to_disk cache_clip_vision_to_disk
        load_image_when_caching_latents fast_image_size debug
        """,
        unless=IsFalse(),
    ),
    # Upstream sets these itself, or reads them only together with an option that is rejected below.
    *noted(
        HARMLESS,
        """
        diff_output_preservation diff_output_preservation_class random_triggers_max guidance_type
        clip_image_augmentations clip_image_shuffle_augmentations num_controls_from_same_folder
        augmentation_cache_epoch bucket_tolerance do_audio audio_preserve_pitch audio_normalize
        """,
        unless=IsFalse(),
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


# -- train -------------------------------------------------------------------------------------------------------------


_NOISE = "the noise is not changed"
_LOSS = "the loss is the plain one between prediction and target"
_PRIOR = "false: no second pass without the adapter is made"
_TEACHER = "nothing: no second network judges the prediction"
_IMAGES = "images and latents stay as they are"

_REJECTED: dict[str, tuple[Any, str]] = {
    "train_unet": (True, "true: the denoiser is what is trained here"),
    "train_text_encoder": (False, "false: text encoders are not trained here"),
    "train_turbo": (False, "false: no turbo training here"),
    "learnable_snr_gos": (False, "false: the loss weights are not learned"),
    "weight_jitter": (0, "0: nothing is added to the weights"),
    "merge_network_on_save": (False, "false: the adapter is a file of its own"),
    "start_step": (None, "nothing: a run starts at 0 or resumes from its checkpoint"),
    "free_u": (False, "false: samples are generated with the model as it is"),
    "adapter_assist_name_or_path": (None, "nothing: no assisting adapter is loaded"),
    "match_adapter_assist": (False, "false: no assisting adapter is loaded"),
    "match_adapter_chance": (0, "0: no assisting adapter is loaded"),
    "noise_multiplier": (1, f"1: {_NOISE}"),
    "target_noise_multiplier": (1, f"1: {_NOISE}"),
    "random_noise_multiplier": (0, f"0: {_NOISE}"),
    "random_noise_shift": (0, f"0: {_NOISE}"),
    "do_signal_correction_noise": (False, f"false: {_NOISE}"),
    "do_batch_noise_correction": (False, f"false: {_NOISE}"),
    "do_signal_amplification": (False, f"false: {_NOISE}"),
    "dynamic_noise_offset": (False, f"false: {_NOISE}"),
    "optimal_noise_pairing_samples": (1, f"1: {_NOISE}"),
    "force_consistent_noise": (False, f"false: {_NOISE}"),
    "blended_blur_noise": (False, f"false: {_NOISE}"),
    "match_noise_norm": (False, f"false: {_NOISE}"),
    "num_train_timesteps": (1000, "1000 timesteps"),
    "first_timestep_chance": (0, "0: timestep_type decides how timesteps are sampled"),
    "img_multiplier": (1, f"1: {_IMAGES}"),
    "noisy_latent_multiplier": (1, f"1: {_IMAGES}"),
    "latent_multiplier": (1, f"1: {_IMAGES}"),
    "adaptive_scaling_factor": (False, f"false: {_IMAGES}"),
    "standardize_images": (False, f"false: {_IMAGES}"),
    "standardize_latents": (False, f"false: {_IMAGES}"),
    "prompt_dropout_prob": (0, "0: use caption_dropout_rate of a dataset"),
    "prompt_saturation_chance": (0, "0: captions are not repeated"),
    "short_and_long_captions": (False, "false: each image has one caption"),
    "short_and_long_captions_encoder_split": (False, "false: each image has one caption"),
    "loss_target": ("noise", f"noise: {_LOSS}"),
    "correct_pred_norm": (False, f"false: {_LOSS}"),
    "pred_scaler": (1, f"1: {_LOSS}"),
    "t0_loss_target": (False, f"false: {_LOSS}"),
    "do_fft_loss": (False, f"false: {_LOSS}"),
    "target_norm_std": (None, f"nothing: {_LOSS}"),
    "max_loss": (None, f"nothing: {_LOSS}"),
    "inverted_mask_prior": (False, _PRIOR),
    "diff_output_preservation": (False, _PRIOR),
    "blank_prompt_preservation": (False, _PRIOR),
    "do_prior_divergence": (False, _PRIOR),
    "do_cfg": (False, "false: training uses no classifier-free guidance"),
    "do_random_cfg": (False, "false: training uses no classifier-free guidance"),
    "do_guidance_loss": (False, "false: training uses no guidance loss"),
    "do_differential_guidance": (False, "false: the target is not pushed past itself"),
    "do_blank_stabilization": (False, "false: not done here"),
    "do_paramiter_swapping": (False, "false: every parameter is trained in every step"),
    "latent_feature_extractor_path": (None, _TEACHER),
    "diffusion_feature_extractor_path": (None, _TEACHER),
    "validation_config": (None, "nothing: held-out loss needs a dataset here, not a list of images"),
}
"""Key -> upstream's default, which is the only accepted value, and what is expected instead of another one."""

UNSUPPORTED_TRAIN_KEYS = tuple(rejected(name, OneOf((default,)), why) for name, (default, why) in _REJECTED.items())

UNUSED_TRAIN_KEYS = (
    *noted(
        HARMLESS,
        """
        xformers sdp train_refiner show_turbo_outputs force_first_sample single_item_batching max_loss_debug
        """,
        unless=IsFalse(),
    ),
    # Upstream reads these nowhere, or only together with a switch that is rejected above.
    *noted(
        HARMLESS,
        """
        unet_lr text_encoder_lr refiner_lr embedding_lr adapter_lr content_or_style_reg merge_network_on_save_strength
        adapter_assist_type batch_noise_correction_scale signal_amplification_strength signal_correction_noise_scale
        negative_prompt max_negative_prompts inverted_mask_prior_multiplier diff_output_preservation_multiplier
        diff_output_preservation_class blank_prompt_preservation_multiplier max_cfg_scale cfg_rescale
        correct_pred_norm_multiplier t0_velocity_equiv_weight do_fft_velocity_equiv_weight target_norm_std_value
        next_sample_timesteps paramiter_swapping_factor latent_feature_loss_weight diffusion_feature_extractor_weight
        guidance_loss_target do_guidance_loss_cfg_zero guidance_loss_schedule unconditional_prompt
        differential_guidance_scale audio_loss_multiplier
        """,
        unless=IsFalse(),
    ),
)
