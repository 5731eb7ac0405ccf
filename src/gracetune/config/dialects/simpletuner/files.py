"""Resolves what a SimpleTuner config refers to: placeholders, environment variables, and the files it names.

The names of the options in an env file (`config.env`) are those of release 4.10.1.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from pathlib import PurePosixPath
from typing import Any

from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.draft import Draft
from gracetune.config.environment import Environment
from gracetune.config.limits import substituted
from gracetune.config.spelling import nearest
from gracetune.config.syntax import Document, read_document
from gracetune.errors import ConfigError

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


def line(options: PeerBlock, name: str, value: str) -> str:
    """Format an option and its value in the syntax of this file, for a hint."""
    if options.reading.format == "env":
        variable = next((known for known, option in ENV_NAMES.items() if option == name), None)
        return f"{variable}={value}" if variable else f'TRAINER_EXTRA_ARGS+=" --{name}={value}"'
    shown = value if value.isdecimal() else f'"{value}"'
    written = {"TOML": f"{name} = {shown}", "YAML": f"{name}: {shown}"}
    return written.get(options.reading.format, f'"{name}": {shown}')


_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True)
class Placeholders:
    """Substitutes `{env:NAME}` anywhere, and `{model_family}`, `{output_dir}` and `{id}` in datasets.

    Other braces stay as they are.
    """

    environment: Environment
    variables: Mapping[str, str]

    def fill(self, value: Any, draft: Draft, key: str, file: str) -> Any:
        if isinstance(value, str):
            return substituted(_PLACEHOLDER, lambda found: self._one(found, draft, key, file), value)
        if isinstance(value, list):
            return [self.fill(item, draft, f"{key}[{index}]", file) for index, item in enumerate(value)]
        if isinstance(value, Mapping):
            return {name: self.fill(item, draft, f"{key}.{name}", file) for name, item in value.items()}
        return value

    def _one(self, found: re.Match[str], draft: Draft, key: str, file: str) -> str:
        if not found[1].startswith("env:"):
            return self.variables.get(found[1], found[0])
        name = found[1].removeprefix("env:")
        text = self.environment.get(name)
        if text is None:
            draft.problem(key, found[0], f"the environment variable {name}, which is not set", f"export {name}=…", file)
        return text or ""


def read_sidecar(options: PeerBlock, name: str, what: str) -> Document | None:
    """Read a file that an option names. Its problems are added to the draft's. Returns None if it is unusable."""
    value = options.take(name)
    if not isinstance(value, str) or not value.strip():
        options.problem(name, f"the path of {what}", f"write the path of {what}")
        return None
    file = find_sidecar(value.strip(), FilePath(options.file))
    if file is None:
        options.problem(name, f"{what}; no such file in the folder of {options.file} or in the working folder",
                        _sidecar_hint(value.strip(), FilePath(options.file)))  # fmt: skip
        return None
    try:
        document = read_document(file)
    except ConfigError as error:
        options.draft.problems += error.problems
        return None
    options.draft.redactor.learn(document.data)
    options.draft.problems += document.problems
    return document


def find_sidecar(value: str, config: FilePath) -> FilePath | None:
    """Find a file relative to the config's folder, the working folder, or the project that has `config/<name>/`."""
    try:
        path = FilePath(value).expanduser()
        folders = [config.parent, FilePath(), *config.absolute().parents[1:3]]
        candidates = [folder / path for folder in folders] + _shipped_examples(value, config)
        return next((file for file in candidates if file.is_file()), None)
    except (OSError, ValueError, RuntimeError):  # a NUL byte, a name that is too long, an unknown user after `~`
        return None


def _shipped_examples(value: str, config: FilePath) -> list[FilePath]:
    """Return where `config/examples/…` can be: next to an example that was copied, or in an installed SimpleTuner."""
    rest = next((value.removeprefix(start) for start in _EXAMPLES if value.startswith(start)), None)
    if rest is None:
        return []
    folders = [config.absolute().parent.parent]
    spec = importlib.util.find_spec("simpletuner")
    if spec is not None and spec.submodule_search_locations:
        folders += [FilePath(root) / "examples" for root in spec.submodule_search_locations]
    return [folder / rest for folder in folders]


_EXAMPLES = ("config/examples/", "simpletuner/examples/")


def _sidecar_hint(value: str, config: FilePath) -> str:
    """Return a hint for a missing file. SimpleTuner's own examples name files that it does not ship."""
    if not value.startswith(_EXAMPLES):
        return "check the spelling, or run from the folder the path starts in"
    wanted = PurePosixPath(value).name
    folder = config.absolute().parent.parent
    try:
        shipped = sorted(path.name for path in folder.glob("*.json") if path.is_file())
    except OSError:
        shipped = []
    alike = _most_alike(wanted, shipped)
    instead = f"; name another, for example {alike}" if alike else ""
    return f"SimpleTuner's examples have no file {wanted}{instead}"


def _most_alike(wanted: str, shipped: list[str]) -> str | None:
    """Return the file with the most words, such as `480p` and `81f`, in common with the name."""
    words = {name: len({*_WORD.findall(name)} & {*_WORD.findall(wanted)}) for name in shipped}
    best = [name for name in shipped if words[name] == max(words.values())]
    return nearest(wanted, best) or next(iter(best), None)


_WORD = re.compile(r"[^\W_]+")
