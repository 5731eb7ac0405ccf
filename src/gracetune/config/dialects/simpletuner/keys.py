"""SimpleTuner's options that have no effect here, are not supported, or apply to the datasets, as of release 4.10.1.

Every option is in exactly one table, which a test checks against the recorded list. Options that are read are in the
module that reads them, and `reader.OPTIONS` has them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.table import Key, KeyTable, Unless, noted, read_elsewhere, rejected
from gracetune.config.dialects.values import is_off
from gracetune.config.families import FAMILIES, names_of

PEER = "SimpleTuner"
ALIASES = {
    "validation_steps": "validation_step_interval",
    "checkpointing_steps": "checkpoint_step_interval",
    "save_total_limit": "checkpoints_total_limit",
    "fused_qkv_projections": "fuse_qkv_projections",
}
"""Older spelling -> option. `vae_cache_preprocess` and `ignore_final_epochs` are absent: their meaning differs."""


def family_of(options: PeerBlock) -> str:
    """Return the family of a config, or "" if gracetune does not support it."""
    value = options.get("model_family")
    family = value.strip().lower() if isinstance(value, str) else ""
    return family if family in FAMILIES else ""


@dataclass(frozen=True)
class Off(Unless):
    """Holds if the option has its default, or if it has no effect in SimpleTuner either, with a config like this."""

    defaults: tuple[Any, ...] = (None,)
    of_families: bool = False
    """Whether it has an effect only in the families that list it (`SimpleTunerNames.unsupported_options`)."""
    switch: str = ""
    """The option that has to be on for this one to have an effect."""
    same_as: str = ""
    """The option that this one may repeat without an effect of its own."""
    off_by: str = ""
    """The option that disables it."""
    lora_type: str = ""
    """The `lora_type` it belongs to; empty means any."""
    behind: str = ""
    """The only option through which it has an effect. That option is rejected when on, so this one never has any."""

    def holds(self, block: PeerBlock, name: str) -> bool:
        value = block.get(name)
        if self.of_families and not family_of(block):
            return True  # the family is missing or misspelt, and reported
        if self.at_default(value) or (self.same_as and value == block.get(self.same_as)):
            return True
        if self.switch and is_off(block.get(self.switch), 0):
            return True
        return self.is_inert(block, name)

    def at_default(self, value: Any) -> bool:
        return any(is_off(value, default) for default in self.defaults)

    def is_inert(self, block: PeerBlock, name: str) -> bool:
        """Whether the option has no effect in SimpleTuner either, with a config like this one."""
        if self.of_families and name not in names_of(family_of(block)).simpletuner.unsupported_options:
            return True
        if self.off_by and block.is_on(self.off_by):
            return True
        return bool(self.lora_type) and (block.get("lora_type") or "standard") != self.lora_type


HARMLESS = "not used here (speed, storage, publishing: gracetune decides)"
SAMPLES_ONLY = "not used here (only sample images and measurements would differ)"
WITHOUT_EFFECT = "without effect, in SimpleTuner too, next to the other settings"

_PASSED_ON = """
    resolution resolution_type minimum_image_size maximum_image_size target_downsample_size caption_strategy
    instance_prompt prepend_instance_prompt only_instance_prompt caption_dropout_probability vae_cache_disable
    parquet_caption_column parquet_filename_column audio_max_duration_seconds audio_channels audio_duration_interval
    audio_truncation_mode aspect_bucket_rounding aspect_bucket_alignment i_know_what_i_am_doing
"""
PASSED_ON: KeyTable[str] = KeyTable(*read_elsewhere(_PASSED_ON))
"""Options that apply to each dataset whose entry does not set them."""

_SPEED_AND_STORAGE = """
    publishing_config post_checkpoint_script post_upload_script push_to_hub_background
    model_card_safe_for_work model_card_note
    model_card_base_model modelspec_comment

    custom_tracker tracker_image_layout logging_dir webhook_config webhook_reporting_interval print_filenames
    print_sampler_statistics debug_aspect_buckets debug_dataset_loader merge_environment_config configs_dir
    disk_low_threshold disk_low_action disk_low_script trust_remote_code

    accelerate_config accelerate_extra_args num_processes num_machines main_process_ip main_process_port machine_rank
    same_network local_rank find_unused_parameters enable_multiprocessing seed_for_each_device fsdp_enable fsdp_version
    fsdp_reshard_after_forward fsdp_state_dict_type fsdp_cpu_ram_efficient_loading fsdp_auto_wrap_policy
    fsdp_limit_all_gathers fsdp_cpu_offload fsdp_activation_checkpointing fsdp_transformer_layer_cls_to_wrap
    context_parallel_size context_parallel_comm_strategy

    dynamo_mode dynamo_fullgraph dynamo_dynamic dynamo_use_regional_compilation dynamo_wrapper dynamo_cache_export
    dynamo_cache_export_after_first_step dynamo_hub_repo_id gradient_checkpointing_backend
    gradient_checkpointing_interval gradient_checkpointing_segment_stride gradient_checkpointing_offload_attention
    gradient_checkpointing_offload_pin_memory_max_buckets gradient_checkpointing_offload_prefetch
    enable_chunked_feed_forward feed_forward_chunk_size fuse_qkv_projections unet_attention_slice set_grads_to_none
    fuse_optimizer optimizer_cpu_offload_method optimizer_offload_gradients optimizer_release_gradients
    ramtorch ramtorch_target_modules ramtorch_text_encoder ramtorch_vae ramtorch_controlnet
    ramtorch_transformer_percent ramtorch_text_encoder_percent ramtorch_disable_sync_hooks ramtorch_disable_extensions
    musubi_blocks_to_swap musubi_block_swap_device offload_during_startup offload_during_save delete_model_after_load
    accelerator_cache_clear_interval keep_vae_loaded fully_unload_text_encoder vae_enable_patch_conv
    vae_enable_temporal_roll ema_device ema_cpu_only ema_foreach_disable torch_num_threads

    vae_dtype text_encoder_1_precision text_encoder_2_precision text_encoder_3_precision text_encoder_4_precision
    base_model_default_dtype gradient_precision disable_tf32 quantize_via
    sdnq_weights_dtype sdnq_quantized_matmul_dtype sdnq_group_size sdnq_use_quantized_matmul sdnq_compile_mode
    sdnq_use_static_quantization sdnq_use_stochastic_rounding sdnq_dequantize_fp32 sdnq_use_svd sdnq_svd_rank
    sdnq_svd_steps sdnq_use_hadamard sdnq_hadamard_group_size sdnq_modules_to_not_convert
    sdnq_modules_to_not_use_matmul sdnq_modules_dtype_dict sdnq_modules_quant_config

    max_workers aws_max_pool_connections dataloader_prefetch dataloader_prefetch_qlen
    dataloader_prefetch_device_threshold_mb aspect_bucket_worker_count image_processing_batch_size write_batch_size
    read_batch_size text_cache_ondemand text_cache_disable text_embed_full_cache vae_cache_ondemand
    vae_cache_scan_behaviour compress_disk_cache aspect_bucket_disable_rebuild
    skip_file_discovery metadata_update_interval preserve_data_backend_cache
    override_dataset_config ignore_missing_files delete_unwanted_images delete_problematic_images delete_nsfw_images
    disable_bucket_pruning allow_dataset_oversubscription strict_epoch_limit
    checkpointing_rolling_steps checkpoints_rolling_total_limit checkpointing_use_tempdir delete_invalid_checkpoints
"""

_REMOVED_UPSTREAM = """
    cache_clear_validation_prompts validation_torch_compile validation_torch_compile_mode enable_group_offload
    group_offload_type group_offload_blocks_per_group group_offload_use_stream group_offload_to_disk_path
    group_offload_text_encoder group_offload_vae enable_xformers_memory_efficient_attention allow_tf32
    aspect_ratio_bucketing aspect_ratio_bucket_min aspect_ratio_bucket_max repeats ez_model_type __disabled_fields__
    __active_tab__ enable_manual_validation vae_cache_preprocess ignore_final_epochs
"""
"""Options of older files and of the web interface, which today's SimpleTuner ignores or does not know."""

_SAMPLES = """
    disable_benchmark validate_after_step validate_after_epoch validation_preview validation_preview_steps
    validation_image_format validation_image_quality validation_method validation_external_script
    validation_external_background validation_using_datasets validation_randomize validation_multigpu
    validation_prompt_library validation_stitch_input_location validation_disable_unconditional
    validation_guidance_skip_layers validation_guidance_skip_layers_start validation_guidance_skip_layers_stop
    validation_guidance_skip_scale validation_noise_scheduler validation_seed_source validation_adapter_path
    validation_adapter_name validation_adapter_strength validation_adapter_mode validation_adapter_config
    validation_guidance_real validation_no_cfg_until_timestep validation_internal_guidance_scale
    validation_audio_duration validation_lyrics inference_scheduler_timestep_spacing ema_validation enable_watermark
    wan_validation_load_other_stage sdxl_validation_pipeline_mode sdxl_validation_stage1_model
    sdxl_validation_stage2_model num_eval_images eval_epoch_interval eval_timesteps eval_dataset_pooling
    eval_dataset_id evaluation_type pretrained_evaluation_model_name_or_path
"""

_OTHER_FAMILIES = """
    adam_beta1 adam_beta2 adam_weight_decay adam_epsilon training_scheduler_timestep_spacing tokenizer_max_length
    disable_multiline_split data_aesthetic_score text_encoder_lr text_encoder_limit save_text_encoder
    freeze_encoder_before freeze_encoder_after freeze_encoder_strategy offload_param_path masked_loss_probability
    pretrained_t5_model_name_or_path pretrained_gemma_model_name_or_path pretrained_grounding_model_name_or_path
    audio_min_duration_seconds audio_flow_schedule_shift

    lyrics_embedder_train lyrics_embedder_optimizer lyrics_embedder_lr lyrics_embedder_lr_scheduler acestep_lora_target
    cosmos3_reasoner_component cosmos3_generator_component custom_text_encoder_intermediary_layers
    deepfloyd_validation_pipeline_mode deepfloyd_validation_stage1_model deepfloyd_validation_stage2_model
    deepfloyd_validation_stage3_mode deepfloyd_validation_stage3_model deepfloyd_validation_stage3_noise_level
    deepfloyd_validation_stage1_num_inference_steps deepfloyd_validation_stage2_num_inference_steps
    deepfloyd_validation_stage1_guidance deepfloyd_validation_stage2_guidance deepfloyd_validation_stage3_guidance
    flux3_prompt_upsample hidream_use_load_balancing_loss hidream_load_balancing_loss_weight
    ideogram_auto_json ideogram_validation ideogram_prompt_upsample ideogram_fp8_base_upcast
    ideogram_prompt_enhancer_head_id ideogram_schedule_mu ideogram_schedule_std ideogram_uncond_ramtorch
    ideogram_load_unconditional_transformer
    ltx_train_mode ltx_i2v_prob ltx_partial_noise_fraction ltx_protect_first_frame
    ltx2_validation_pipeline_mode ltx2_validation_spatial_upsampler_model ltx2_validation_spatial_upsampler_filename
    ltx2_validation_audio_guidance ltx2_intrinsic_conditioning validation_audio_only
    validation_ltx2_video_conditioning ltx2_first_frame_conditioning_probability ltx2_prefix_conditioning_probability
    ltx2_suffix_conditioning_probability ltx2_mask_conditioning_probability ltx2_prefix_conditioning_frames
    ltx2_suffix_conditioning_frames ltx2_reference_spatial_scale_factor ltx2_reference_temporal_scale_factor
    minimax_h3_reference_mode minimax_h3_target_mode minimax_h3_sparse_attention minimax_h3_sparse_block_shape
    minimax_h3_sparse_video_kv_fraction minimax_h3_sparse_share_heads minimax_h3_sparse_start_layer
    minimax_music_train_component minimax_music_rvq_encoder_model_name_or_path minimax_music_rvq_encoder_subfolder
    minimax_music_rvq_encoder_revision minimax_music_rvq_vae_model_name_or_path minimax_music_lm_adapter
    minimax_music_lm_adapter_strength minimax_music_lm_precache_mode minimax_music_lm_max_frames
    minimax_music_lm_window_mode minimax_music_lm_target_frames minimax_music_lm_continuation_crop_mode
    minimax_music_lm_min_duration_seconds minimax_music_lm_max_duration_seconds
    moss_image_validation_shift moss_image_uncond_skip_layers moss_image_auto_json moss_image_prompt_upsample
    moss_image_prompt_upsampler_model_id pixart_validation_pipeline_mode pixart_validation_stage1_model
    pixart_validation_stage2_model sana_complex_human_instruction sd3_clip_uncond_behaviour sd3_t5_uncond_behaviour
"""
"""Options without an effect in SimpleTuner for the families that gracetune trains: other families', or dead ones."""

REMOVED_UPSTREAM = noted(HARMLESS, _REMOVED_UPSTREAM, unless=Off())
NOT_USED = (
    *noted(HARMLESS, _SPEED_AND_STORAGE, unless=Off()),
    *noted(SAMPLES_ONLY, _SAMPLES, unless=Off()),
    *noted(WITHOUT_EFFECT, _OTHER_FAMILIES, unless=Off()),
    *REMOVED_UPSTREAM,
)


def _not_done(
    name: str,
    default: Any,
    why: str,
    *,
    of_families: bool = False,
    switch: str = "",
    same_as: str = "",
    off_by: str = "",
    lora_type: str = "",
) -> Key:
    """An unsupported option. `default` is the value that has no effect; for the others see `Off`."""
    return rejected(name, Off((default,), of_families, switch, same_as, off_by, lora_type), why)


_WEIGHTS = "a part of the model from elsewhere is not supported: one model, with an optional VAE and text encoder"
_BASE = "pretrained_model_name_or_path"
_GUIDANCE = "the guidance input is the same for every sample: write flux_guidance_value"
_REGULARISER = "this auxiliary loss is not implemented"

NOT_DONE = (
    _not_done("controlnet", False, "ControlNet training is not implemented"),
    _not_done("control", False, "control-input training is not implemented"),
    _not_done("diffusion_blocks_config", None, "block-wise training is not implemented"),
    _not_done("distillation_method", None, "distillation is not implemented"),
    _not_done("crepa_enabled", False, _REGULARISER),
    _not_done("irepa_enabled", False, _REGULARISER),
    _not_done("urepa_enabled", False, _REGULARISER, of_families=True),
    _not_done("layersync_enabled", False, _REGULARISER),
    _not_done("nextlat_enabled", False, _REGULARISER),
    _not_done("internal_guidance_enabled", False, _REGULARISER),
    _not_done("twinflow_enabled", False, "TwinFlow is not implemented"),
    _not_done("xm_enabled", False, "candidate selection (XM) is not implemented"),
    _not_done("mixflow_enabled", False, "MixFlow sampling is not implemented"),
    _not_done("diff2flow_enabled", False, "the diffusion-to-flow bridge is not implemented", of_families=True),
    _not_done("scheduled_sampling_max_step_offset", 0, "scheduled sampling is not implemented"),
    _not_done("train_text_encoder", False, "text encoders stay frozen"),
    _not_done("layer_freeze_strategy", None, "freezing layers is not implemented"),
    _not_done("slider_lora_target", False, "name modules in peft_lora_target_modules instead", lora_type="standard"),
    _not_done("peft_lora_mode", "standard", "only standard LoRA is implemented", lora_type="standard"),
    _not_done("lora_init_type", "default", "only LoRA's own initialization is implemented", lora_type="standard"),
    _not_done("init_lora_step", None, "an adapter is taken up as a whole, at step 0"),
    _not_done("init_lora_ema", None, "an averaged adapter cannot be taken up"),
    _not_done("init_lokr_norm", None, "a perturbed LoKr start is not implemented", lora_type="lycoris"),
    _not_done(
        "quantization_config", None, "base weights are bf16, fp16, fp32, fp8 or int8; pipeline quantization is not done"
    ),
    _not_done("quantize_activations", False, "activations are not quantized"),
    _not_done("deepspeed_config", None, "DeepSpeed brings its own optimizer; memory is managed by gracetune's plan"),
    _not_done("sla_config", None, "sparse linear attention is not implemented"),
    _not_done("lr_scale", False, "the learning rate is taken as written"),
    _not_done("lr_scale_sqrt", False, "the learning rate is taken as written"),
    _not_done("input_perturbation_steps", 0, "the perturbation does not fade out", switch="input_perturbation"),
    _not_done("soft_min_snr_sigma_data", None, "soft min-SNR uses the family's own sigma", switch="use_soft_min_snr"),
    _not_done("snr_weight", 1.0, "the loss is not scaled", of_families=True),
    _not_done("flow_custom_timesteps", None, "a fixed list of timesteps is not implemented"),
    _not_done("flow_cubic_schedule_weights", None, "a spline over timesteps is not implemented"),
    _not_done("flux_fast_schedule", False, "the few-step schedule is not implemented", of_families=True),
    _not_done("flux_guidance_mode", "constant", _GUIDANCE, of_families=True),
    _not_done(
        "flux_attention_masked_training", False, "attention masking is not implemented for Flux", of_families=True
    ),
    _not_done("t5_padding", "unmodified", "text embeddings are padded as the model was trained", of_families=True),
    _not_done("wan_force_2_1_time_embedding", False, "each Wan release keeps its own time embedding", of_families=True),
    _not_done("krea2_reference_latents", False, "reference images are not supported for Krea 2", of_families=True),
    _not_done("rescale_betas_zero_snr", False, "zero-terminal-SNR schedules are not implemented", of_families=True),
    _not_done("refiner_training", False, "the refiner is not supported", of_families=True),
    _not_done("sdxl_refiner_uses_full_range", False, "the refiner is not supported", of_families=True),
    _not_done("timestep_bias_strategy", None, "this bias over timesteps is not implemented", of_families=True),
    _not_done("max_upscale_threshold", None, "filter by minimum_image_size instead"),
    _not_done("enable_nsfw_check", False, "images are not classified; take them out of the folder yourself"),
    _not_done("max_grounding_entities", 0, "grounding is not implemented"),
    _not_done("pretrained_transformer_model_name_or_path", None, _WEIGHTS, same_as=_BASE),
    _not_done("pretrained_transformer_subfolder", "transformer", _WEIGHTS),
    _not_done("pretrained_unet_model_name_or_path", None, _WEIGHTS, of_families=True, same_as=_BASE),
    _not_done("pretrained_unet_subfolder", "unet", _WEIGHTS, of_families=True),
)


def _behind(switch: str, names: str) -> tuple[Key, ...]:
    """Options that have an effect only while `switch` is on."""
    return noted(WITHOUT_EFFECT, names, unless=Off(behind=switch))


GATED = (
    *_behind("controlnet", "controlnet_custom_config controlnet_model_name_or_path"),
    *_behind(
        "crepa_enabled",
        """
        crepa_block_index crepa_lambda crepa_adjacent_distance crepa_adjacent_tau crepa_encoder
        crepa_encoder_frames_batch_size crepa_use_backbone_features crepa_feature_source crepa_self_flow
        crepa_teacher_block_index crepa_self_flow_mask_ratio crepa_encoder_image_size crepa_drop_vae_encoder
        crepa_normalize_by_frames crepa_normalize_neighbour_sum crepa_spatial_align crepa_use_tae crepa_scheduler
        crepa_warmup_steps crepa_decay_steps crepa_lambda_end crepa_power crepa_cutoff_step
        crepa_similarity_threshold crepa_similarity_ema_decay crepa_threshold_mode
        """,
    ),
    *_behind("irepa_enabled", "irepa_spatial_norm_alpha irepa_projector_kernel_size"),
    *_behind(
        "urepa_enabled",
        """
        urepa_lambda urepa_manifold_weight urepa_model urepa_encoder_image_size urepa_use_tae urepa_scheduler
        urepa_warmup_steps urepa_decay_steps urepa_lambda_end urepa_power urepa_cutoff_step
        urepa_similarity_threshold urepa_similarity_ema_decay urepa_threshold_mode
        """,
    ),
    *_behind("layersync_enabled", "layersync_student_block layersync_teacher_block layersync_lambda"),
    *_behind("nextlat_enabled", "nextlat_block_index nextlat_weight nextlat_state_loss nextlat_kl_weight"),
    *_behind("internal_guidance_enabled", "internal_guidance_loss_weight internal_guidance_block_index"),
    *_behind("twinflow_enabled", "twinflow_target_step_count"),
    *_behind("xm_enabled", "xm_candidate_count xm_training_target xm_selection_scope xm_block_size"),
    *_behind("mixflow_enabled", "mixflow_gamma"),
    *_behind("diff2flow_enabled", "diff2flow_loss"),
    *_behind(
        "scheduled_sampling_max_step_offset",
        """
        scheduled_sampling_strategy scheduled_sampling_probability scheduled_sampling_prob_start
        scheduled_sampling_prob_end scheduled_sampling_ramp_steps scheduled_sampling_start_step
        scheduled_sampling_ramp_shape scheduled_sampling_sampler scheduled_sampling_order
        scheduled_sampling_reflexflow scheduled_sampling_reflexflow_alpha scheduled_sampling_reflexflow_beta1
        scheduled_sampling_reflexflow_beta2
        """,
    ),
    *_behind("distillation_method", "distillation_config"),
    *_behind("peft_lora_mode", "singlora_ramp_up_steps"),
    *_behind("flow_custom_timesteps", "flow_timesteps_mode"),
    *_behind("flux_guidance_mode", "flux_guidance_min flux_guidance_max"),
    *_behind("refiner_training", "refiner_training_invert_schedule refiner_training_strength"),
    *_behind(
        "timestep_bias_strategy", "timestep_bias_begin timestep_bias_end timestep_bias_multiplier timestep_bias_portion"
    ),
    *_behind(
        "enable_nsfw_check",
        """
        nsfw_check_models nsfw_check_min_votes nsfw_check_backend_types nsfw_check_sample_types
        nsfw_check_video_frame_count nsfw_check_video_frame_selection nsfw_check_video_min_flagged_frames
        """,
    ),
)
"""Options that have an effect only with a switch. The switch is rejected when on, so these never have one here."""
