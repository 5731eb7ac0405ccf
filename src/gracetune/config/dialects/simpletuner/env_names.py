"""Names of SimpleTuner's options in an env file (`config.env`), as of release 4.10.1."""

from __future__ import annotations

_SAME_NAME = """
    aspect_bucket_rounding accelerate_extra_args use_ema output_dir use_dora lora_type lycoris_config
    push_to_hub push_to_hub_background publishing_config checkpoint_step_interval checkpoint_epoch_interval
    model_card_safe_for_work tracker_project_name tracker_run_name model_type model_family
    qwen_text_encoder_model_name_or_path train_batch_size gradient_checkpointing_offload_attention
    gradient_checkpointing_offload_prefetch gradient_checkpointing_offload_pin_memory_max_buckets
    gradient_checkpointing_segment_stride enable_chunked_feed_forward feed_forward_chunk_size
    caption_dropout_probability resolution_type resolution validation_seed validation_step_interval
    validation_epoch_interval validate_after_step validate_after_epoch validation_resolution
    validation_guidance validation_method validation_external_script validation_external_background
    deepfloyd_validation_pipeline_mode deepfloyd_validation_stage1_model deepfloyd_validation_stage2_model
    deepfloyd_validation_stage3_mode deepfloyd_validation_stage3_model
    deepfloyd_validation_stage1_num_inference_steps deepfloyd_validation_stage2_num_inference_steps
    deepfloyd_validation_stage1_guidance deepfloyd_validation_stage2_guidance
    deepfloyd_validation_stage3_guidance deepfloyd_validation_stage3_noise_level
    wan_validation_load_other_stage sdxl_validation_pipeline_mode sdxl_validation_stage1_model
    sdxl_validation_stage2_model pixart_validation_pipeline_mode pixart_validation_stage1_model
    pixart_validation_stage2_model ltx2_validation_pipeline_mode ltx2_validation_spatial_upsampler_model
    ltx2_validation_spatial_upsampler_filename ltx2_validation_audio_guidance post_checkpoint_script
    post_upload_script validation_guidance_rescale validation_num_inference_steps validation_prompt
    validation_input allow_tf32 mixed_precision optimizer learning_rate lr_warmup_steps base_model_precision
    quantize_via quantization_config sdnq_weights_dtype sdnq_quantized_matmul_dtype sdnq_group_size
    sdnq_use_quantized_matmul sdnq_compile_mode sdnq_use_static_quantization sdnq_use_stochastic_rounding
    sdnq_dequantize_fp32 sdnq_use_svd sdnq_svd_rank sdnq_svd_steps sdnq_use_hadamard sdnq_hadamard_group_size
    sdnq_modules_to_not_convert sdnq_modules_to_not_use_matmul sdnq_modules_dtype_dict
    sdnq_modules_quant_config validation_guidance_real validation_no_cfg_until_timestep
    training_scheduler_timestep_spacing inference_scheduler_timestep_spacing gradient_accumulation_steps
    lr_end flux_guidance_value flux_lora_target validation_negative_prompt metadata_update_interval
    read_batch_size write_batch_size text_encoder_batch_size text_cache_ondemand text_cache_disable
    aws_max_pool_connections torch_num_threads image_processing_batch_size disable_benchmark
"""

_OTHER_NAME = {
    "RESUME_CHECKPOINT": "resume_from_checkpoint",
    "DATALOADER_CONFIG": "data_backend_config",
    "TRAINING_SEED": "seed",
    "ACCELERATE_CONFIG_PATH": "accelerate_config",
    "USE_XFORMERS": "enable_xformers_memory_efficient_attention",
    "MINIMUM_RESOLUTION": "minimum_image_size",
    "USE_BITFIT": "layer_freeze_strategy=bitfit",
    "PUSH_CHECKPOINTS": "push_checkpoints_to_hub",
    "MAX_NUM_STEPS": "max_train_steps",
    "NUM_EPOCHS": "num_train_epochs",
    "CHECKPOINTING_STEPS": "checkpoint_step_interval",
    "CHECKPOINTING_LIMIT": "checkpoints_total_limit",
    "HUB_MODEL_NAME": "hub_model_id",
    "MODEL_NAME": "pretrained_model_name_or_path",
    "USE_GRADIENT_CHECKPOINTING": "gradient_checkpointing",
    "VALIDATION_STEPS": "validation_step_interval",
    "LR_SCHEDULE": "lr_scheduler",
    "TRAINING_NUM_PROCESSES": "num_processes",
    "TRAINING_NUM_MACHINES": "num_machines",
    "TRAINER_DYNAMO_BACKEND": "dynamo_backend",
    "TRAINING_DYNAMO_BACKEND": "dynamo_backend",
}

ENV_NAMES: dict[str, str] = {name.upper(): name for name in _SAME_NAME.split()} | _OTHER_NAME
"""Variable -> option. For `option=value`, the variable is a boolean, and `true` sets the option to this value."""

FOREIGN_VARIABLES = (
    "ACCELERATE_", "AWS_", "CONFIG_", "CUDA_", "ENV", "GH200_UVM_", "HF_", "HUGGING", "LD_", "MASTER_", "NCCL_", "OMP_",
    "PATH", "PYTHON", "PYTORCH_", "SIMPLETUNER_", "TOKENIZERS_", "TORCH_", "TORCHINDUCTOR_", "TQDM_", "TRITON_",
    "VENV", "VIRTUAL_ENV", "WANDB_",
)  # fmt: skip
"""Prefixes of variables that configure other programs. They are valid in an env file, because a shell sources it."""
