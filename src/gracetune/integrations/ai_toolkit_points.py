"""The names our overlay uses in ai-toolkit: extension loading, trainer, caches, optimizer, adapter files, config."""

from __future__ import annotations

from typing import Final

from gracetune.integrations.points import Point

_EXTENSION: Final = "toolkit.extension"
_PROCESS: Final = "jobs.process.BaseProcess"
_TRAINER: Final = "jobs.process.BaseSDTrainProcess"
_DATA: Final = "toolkit.dataloader_mixins"
_PROMPTS: Final = "toolkit.prompt_utils"
_OPTIMIZER: Final = "toolkit.optimizer"
_AUTOMAGIC: Final = "toolkit.optimizers.automagic"
_NETWORK: Final = "toolkit.network_mixins"
_WAN: Final = "extensions_built_in.diffusion_models.wan22.wan22_14b_model"
_CONFIG: Final = "toolkit.config_modules"

# The columns of each row are the fields of `Point`: name, needed_for, module, target, parameters.
ENTRY: Final = (
    Point("extension.class", "our extension, as ai-toolkit finds it", _EXTENSION, "Extension.get_process", "cls"),
    Point("extension.found", "our extension, as ai-toolkit finds it", _EXTENSION, "get_all_extensions", ""),
    Point(
        "extension.processes", "our extension, before any job starts", _EXTENSION,
        "get_all_extensions_process_dict", "",
    ),
    Point(
        "process.init", "the `gracetune:` block of a job", _PROCESS,
        "BaseProcess.__init__", "self, process_id, job, config",
    ),
)  # fmt: skip

TRAINER: Final = (
    Point("trainer.class", "the class every trainer is made of", _TRAINER, "BaseSDTrainProcess"),
    Point(
        "trainer.init", "the memory layer opened before a model is loaded", _TRAINER, "BaseSDTrainProcess.__init__",
        "self, process_id, job, config, custom_pipeline=...", needed=False,
    ),
    Point(
        "trainer.run", "features put in place for one run and taken out after it", _TRAINER,
        "BaseSDTrainProcess.run", "self",
    ),
    Point(
        "trainer.end_of_step", "the governor looks at memory between steps", _TRAINER,
        "BaseSDTrainProcess.end_step_hook", "self",
    ),
    Point("trainer.save", "a checkpoint when memory runs out", _TRAINER, "BaseSDTrainProcess.save", "self, step=..."),
    Point(
        "trainer.before_loop", "the caches are whole by then", _TRAINER, "BaseSDTrainProcess.hook_before_train_loop",
        "self", needed=False,
    ),
    Point(
        "trainer.train_loop", "a step's beginning and end", _TRAINER, "BaseSDTrainProcess.hook_train_loop",
        "self, batch", needed=False,
    ),
    Point(
        "trainer.load_weights", "an adapter read back", _TRAINER,
        "BaseSDTrainProcess.load_weights", "self, path", needed=False,
    ),
)  # fmt: skip

CACHES: Final = (
    Point(
        "latents.cache_all", "latents made resident once they are all there", _DATA,
        "LatentCachingMixin.cache_latents_all_latents", "self",
    ),
    Point(
        "latents.path", "which cache file belongs to an image", _DATA,
        "LatentCachingFileItemDTOMixin.get_latent_path", "self, recalculate=...",
    ),
    Point(
        "latents.read", "latents answered from memory", _DATA, "LatentCachingFileItemDTOMixin.get_latent",
        "self, device=...", needed=False,
    ),
    Point("latents.load_file", "latents answered from memory", _DATA, "load_file", imported=True),
    Point(
        "embeddings.cache_all", "text embeddings made resident once they are all there", _DATA,
        "TextEmbeddingCachingMixin.cache_text_embeddings", "self",
    ),
    Point(
        "embeddings.path", "which cache file belongs to a caption", _DATA,
        "TextEmbeddingFileItemDTOMixin.get_text_embedding_path", "self, recalculate=...",
    ),
    Point("embeddings.load_file", "text embeddings answered from memory", _PROMPTS, "load_file", imported=True),
    Point(
        "embeddings.read", "text embeddings read from a cache file", _PROMPTS,
        "PromptEmbeds.load", "cls, path", needed=False,
    ),
    Point(
        "embeddings.write", "text embeddings written to a cache file", _PROMPTS,
        "PromptEmbeds.save", "self, path", needed=False,
    ),
)  # fmt: skip

OPTIMIZER: Final = (
    Point("optimizer.called", "Automagic with options per expert", _TRAINER, "get_optimizer", imported=True),
    Point(
        "optimizer.factory", "Automagic with options per expert", _OPTIMIZER, "get_optimizer",
        "params, optimizer_type=..., learning_rate=..., optimizer_params=...",
    ),
    Point(
        "optimizer.automagic", "the options that upstream's own Automagic takes", _AUTOMAGIC, "Automagic.__init__",
        "self, params, lr=..., min_lr=..., max_lr=..., lr_bump=...", needed=False,
    ),
    Point(
        "optimizer.modules", "parameter groups by noise expert", _NETWORK,
        "ToolkitNetworkMixin.get_all_modules", "self",
    ),
)  # fmt: skip

FILES_AND_CONFIG: Final = (
    Point(
        "wan22.save_lora", "the pair of files with the right keys", _WAN, "Wan2214bModel.save_lora",
        "self, state_dict, output_path, metadata=...",
    ),
    Point("wan22.load_lora", "the pair of files read back", _WAN, "Wan2214bModel.load_lora", "self, file"),
    Point(
        "wan22.experts", "which expert a module belongs to", _WAN, "DualWanTransformer3DModel.__init__",
        "self, transformer_1, transformer_2", needed=False,
    ),
    Point(
        "config.network", "the network block of a job", _CONFIG,
        "NetworkConfig.__init__", "self, **kwargs", needed=False,
    ),
    Point("config.train", "the train block of a job", _CONFIG, "TrainConfig.__init__", "self, **kwargs", needed=False),
    Point("config.model", "the model block of a job", _CONFIG, "ModelConfig.__init__", "self, **kwargs", needed=False),
    Point(
        "config.dataset", "a dataset block of a job", _CONFIG,
        "DatasetConfig.__init__", "self, **kwargs", needed=False,
    ),
)  # fmt: skip

POINTS: Final = (*ENTRY, *TRAINER, *CACHES, *OPTIMIZER, *FILES_AND_CONFIG)
