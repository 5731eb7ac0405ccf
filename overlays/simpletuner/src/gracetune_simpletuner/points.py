"""Every name of upstream that we wrap, as data. The module imports nothing of upstream, so tools can read the list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Feature = Literal["raw_config", "in_memory", "caches", "memory", "placement", "ramp", "telemetry"]


@dataclass(frozen=True)
class Hook:
    """One wrapped name."""

    target: str
    """`module:Class.method`, `module:function`, or `module:table[key]` for an entry of a module's dict."""
    feature: Feature
    why: str
    on_import: bool = False
    """Wrap only when upstream imports the module, because it needs optional packages."""


_CONFIG: Final = "simpletuner.helpers.configuration"
_DATA: Final = "simpletuner.helpers.data_backend"
_AUDIO: Final = "simpletuner.helpers.audio.load"
_TRAINER: Final = "simpletuner.helpers.training.trainer:Trainer"

HOOKS: Final = (
    Hook(f"{_CONFIG}.json_file:mapping_to_cli_args", "raw_config", "a JSON config's blocks, before they are dropped"),
    Hook(f"{_CONFIG}.toml_file:mapping_to_cli_args", "raw_config", "the same for TOML"),
    Hook(f"{_CONFIG}.loader:helpers[cmd]", "raw_config", "where every config format ends; the parsed options"),
    Hook(f"{_DATA}.factory:FactoryRegistry.load_configuration", "raw_config", "datasets of type in_memory"),
    Hook(f"{_DATA}.builders.local:LocalBackendBuilder._create_backend", "in_memory", "the staged files of a dataset"),
    Hook(f"{_DATA}.local:LocalDataBackend.from_instance_representation", "in_memory", "the same in a worker process"),
    Hook(f"{_DATA}.local:load_image", "in_memory", "images decoded from memory"),
    Hook(f"{_DATA}.local:load_video", "in_memory", "clips decoded from memory"),
    Hook(f"{_AUDIO}:load_audio", "in_memory", "sounds decoded from memory", on_import=True),
    Hook(f"{_AUDIO}:load_audio_from_video", "in_memory", "soundtracks decoded from memory", on_import=True),
    Hook(f"{_DATA}.local:LocalDataBackend.torch_load", "caches", "entries served from memory"),
    Hook(f"{_DATA}.local:LocalDataBackend.torch_save", "caches", "a rewritten entry is forgotten"),
    Hook(f"{_DATA}.local:LocalDataBackend.write", "caches", "a rewritten entry is forgotten"),
    Hook(f"{_DATA}.local:LocalDataBackend.delete", "caches", "a deleted entry is forgotten"),
    Hook(f"{_DATA}.local:LocalDataBackend.exists", "caches", "entries in memory need no look at the disk"),
    Hook(f"{_TRAINER}.resume_and_prepare", "caches", "models are loaded and entries written: load them into memory"),
    Hook(f"{_TRAINER}.init_preprocessing_models", "memory", "the memory layer opens before any model is loaded"),
    Hook(f"{_TRAINER}._exit_on_signal", "memory", "a step boundary: the governor checks memory"),
    Hook(f"{_TRAINER}.prepare_batch", "placement", "hints for the tensors of a prepared batch"),
    Hook(f"{_TRAINER}._recalculate_training_steps", "ramp", "the number of steps that the ramp really gives"),
    Hook(f"{_TRAINER}.prepare_batch", "ramp", "how many samples the next micro-batch has"),
    Hook("accelerate:Accelerator.accumulate", "ramp", "an optimizer step begins: fix its accumulation"),
    Hook("accelerate:Accelerator.backward", "ramp", "every sample of a step has the same weight"),
    Hook(f"{_TRAINER}.train", "telemetry", "the counts of a run, written when it ends"),
)

USES: Final = (
    "simpletuner.helpers.data_backend.local:LocalDataBackend",
    "simpletuner.helpers.data_backend.local:LocalDataBackend.read",
    "simpletuner.helpers.data_backend.local:LocalDataBackend.open_file",
    "simpletuner.helpers.data_backend.local:LocalDataBackend.list_files",
    "simpletuner.helpers.training.state_tracker:StateTracker.get_data_backends",
    "simpletuner.helpers.caching.text_embeds:TextEmbeddingCache.active_caches",
    "simpletuner.helpers.caching.vae:VAECache.generate_vae_cache_filename",
    "simpletuner.helpers.training.trainer:Trainer._get_trainable_parameters",
)
"""Names of upstream that are called or subclassed, not wrapped."""


READS: Final = {
    "config": ("output_dir", "train_batch_size", "gradient_accumulation_steps"),
    "config.epochs": ("num_train_epochs",),
    "config.steps": ("total_num_batches", "overrode_max_train_steps", "max_train_steps", "num_train_epochs"),
    "config.loader": ("dataloader_prefetch", "dataloader_prefetch_qlen"),
    "Trainer": ("config", "state", "accelerator"),
    "Trainer.state": ("global_step",),
    "Accelerator": ("step", "gradient_accumulation_steps", "sync_gradients", "device", "reduce"),
    "BaseBackendConfig": ("id",),
    "dataset": ("metadata_backend",),
    "metadata backend": ("aspect_ratio_bucket_indices",),
    "VAECache": ("vae_cache_disable", "cache_data_backend", "cache_dir", "generate_vae_cache_filename"),
    "TextEmbeddingCache": ("id", "text_cache_disable", "data_backend", "cache_dir"),
    "data backend": ("type", "torch_load", "list_files"),
}
"""Attributes that we read or set on upstream's objects. Most are created in constructors, so only a run can check
them."""


def hooks_of(feature: Feature) -> tuple[Hook, ...]:
    return tuple(hook for hook in HOOKS if hook.feature == feature)
