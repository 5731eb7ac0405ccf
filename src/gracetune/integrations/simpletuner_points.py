"""The names our overlay uses in SimpleTuner: the merge guide's eight places in its trainer, caches, state, data,
audio."""

from __future__ import annotations

from typing import Final

from gracetune.integrations.points import Point

_TRAINER: Final = "simpletuner.helpers.training.trainer"
_ATTENTION: Final = "simpletuner.helpers.training.attention_backend"
_VAE: Final = "simpletuner.helpers.caching.vae"
_TEXT: Final = "simpletuner.helpers.caching.text_embeds"
_COLLATE: Final = "simpletuner.helpers.training.collate"
_STATE: Final = "simpletuner.helpers.training.state_tracker"
_LOADER: Final = "simpletuner.helpers.configuration.loader"
_JSON: Final = "simpletuner.helpers.configuration.json_file"
_TOML: Final = "simpletuner.helpers.configuration.toml_file"
_ENV: Final = "simpletuner.helpers.configuration.env_file"
_CLI_UTILS: Final = "simpletuner.helpers.configuration.cli_utils"
_ARGUMENTS: Final = "simpletuner.helpers.configuration.cmd_args"
_FACTORY: Final = "simpletuner.helpers.data_backend.factory"
_LOCAL: Final = "simpletuner.helpers.data_backend.local"
_IMAGES: Final = "simpletuner.helpers.image_manipulation.load"
_BUILDERS: Final = "simpletuner.helpers.data_backend.builders"
_BACKEND_CONFIG: Final = "simpletuner.helpers.data_backend.config"
_FETCHER: Final = "simpletuner.helpers.data_backend.runtime.batch_fetcher"
_ITERATOR: Final = "simpletuner.helpers.data_backend.runtime.dataloader_iterator"
_FIELDS: Final = "simpletuner.simpletuner_sdk.server.services.field_registry.registry"
_SOUND: Final = "simpletuner.helpers.audio"
_AUDIO: Final = "simpletuner.helpers.audio.load"
_MODELS: Final = "simpletuner.helpers.models.registry"

# The columns of each row are the fields of `Point`: name, needed_for, module, target, parameters.
TRAINER: Final = (
    # The merge guide's section 5.1, in its order.
    Point("trainer.module", "the guide's place for imports", _TRAINER, needed=False),
    Point("trainer.class", "the class every hook of the trainer sits on", _TRAINER, "Trainer"),
    Point(
        "trainer.init", "the guide's place for state of ours, before upstream reads its arguments", _TRAINER,
        "Trainer.__init__", "self, config=..., disable_accelerator=..., job_id=..., exit_on_error=...", needed=False,
    ),
    Point(
        "trainer.runtime_config", "the guide's place for memory options: after the accelerator", _TRAINER,
        "Trainer.__init__", calls=("parse_arguments", "_misc_init"), needed=False,
    ),
    Point(
        "trainer.parse_arguments", "the guide's place for gh200_optimizations and cache_config", _TRAINER,
        "Trainer.parse_arguments", "self, args=..., disable_accelerator=..., exit_on_error=...", needed=False,
    ),
    Point(
        "trainer.accumulate", "the batch ramp: a step begins before upstream accumulates", _TRAINER, "Trainer.train",
        calls=("prepare_batch", "accelerator.accumulate"),
    ),
    Point(
        "trainer.prepare_batch", "per-batch placement", _TRAINER, "Trainer.prepare_batch", "self, batch",
    ),
    Point(
        "trainer.manual_validation", "a validation on request never sees the ramp change", _TRAINER,
        "Trainer._consume_manual_validation_request", "self", needed=False,
    ),
    # Names in addition to the eight places.
    Point(
        "trainer.register_manual_validation", "a validation on request never sees the ramp change", _TRAINER,
        "Trainer.register_manual_validation_trigger", "self, consumer", needed=False,
    ),
    Point(
        "trainer.attention_controller", "upstream's attention switching goes on beside our hooks", _ATTENTION,
        "AttentionBackendController.apply", "cls, config, phase", needed=False,
    ),
    Point("trainer.run", "the order of a run's parts", _TRAINER, "Trainer.run", "self", needed=False),
    Point("trainer.train", "telemetry: the counts of a run, written when it ends", _TRAINER, "Trainer.train", "self"),
    Point(
        "trainer.init_hooks", "state of ours in upstream's checkpoints", _TRAINER,
        "Trainer.init_hooks", "self", needed=False,
    ),
    Point(
        "trainer.exit_on_signal", "a step boundary, where the governor looks; a clean end on a signal", _TRAINER,
        "Trainer._exit_on_signal", "self",
    ),
    Point(
        "trainer.init_data_backend", "datasets and caches built", _TRAINER,
        "Trainer.init_data_backend", "self", needed=False,
    ),
    Point(
        "trainer.resume_and_prepare", "caches made resident once upstream has filled them", _TRAINER,
        "Trainer.resume_and_prepare", "self",
    ),
    Point(
        "trainer.preprocessing_models", "the memory layer opened before any model is loaded", _TRAINER,
        "Trainer.init_preprocessing_models", "self, move_to_accelerator=...",
    ),
    Point(
        "trainer.trainable_parameters", "the ramp's weights reach every gradient", _TRAINER,
        "Trainer._get_trainable_parameters", "self",
    ),
    Point(
        "trainer.recalculate_steps", "the number of optimizer steps under a batch ramp", _TRAINER,
        "Trainer._recalculate_training_steps", "self",
    ),
    Point(
        "trainer.lr_scheduler", "the learning rate's schedule under a batch ramp", _TRAINER,
        "Trainer.init_lr_scheduler", "self", needed=False,
    ),
    Point(
        "trainer.checkpoint_save", "the ramp's position beside upstream's checkpoint", _TRAINER,
        "Trainer.checkpoint_state_save", "self, output_dir, suffix=...", needed=False,
    ),
    Point(
        "trainer.resume", "the ramp's position read back", _TRAINER, "Trainer.init_resume_checkpoint",
        "self, lr_scheduler", needed=False,
    ),
)  # fmt: skip

CACHES: Final = (
    Point(
        "vae_cache.read", "latents answered from memory", _VAE, "VAECache.retrieve_from_cache", "self, filepath",
        needed=False,
    ),
    Point(
        "vae_cache.read_storage", "latents answered from memory", _VAE, "VAECache._read_from_storage",
        "self, filename, hide_errors=...", needed=False,
    ),
    Point(
        "vae_cache.write", "latents kept in memory as they are written", _VAE, "VAECache._write_latents_in_batch",
        "self, input_latents=...", needed=False,
    ),
    Point(
        "vae_cache.file_name", "which cache file belongs to an image", _VAE, "VAECache.generate_vae_cache_filename",
        "self, filepath",
    ),
    Point(
        "text_cache.read", "text embeddings answered from memory", _TEXT, "TextEmbeddingCache.load_from_cache",
        "self, filename", needed=False,
    ),
    Point(
        "text_cache.write", "text embeddings kept in memory as they are written", _TEXT,
        "TextEmbeddingCache.save_to_cache", "self, filename, embeddings", needed=False,
    ),
    Point("text_cache.active", "every text cache of the run", _TEXT, "TextEmbeddingCache.active_caches", "cls"),
    Point(
        "collate.latents", "the batch's latents, gathered", _COLLATE, "compute_latents",
        "filepaths, data_backend_id, model", needed=False,
    ),
    Point(
        "collate.embeddings", "the batch's embeddings, gathered", _COLLATE, "compute_prompt_embeddings",
        "prompt_entries, text_embed_cache, model", needed=False,
    ),
)  # fmt: skip

STATE_AND_CONFIG: Final = (
    Point(
        "state.set_args", "the parsed configuration, where the fork kept the raw one", _STATE,
        "StateTracker.set_args", "cls, args", needed=False,
    ),
    Point(
        "state.get_args", "the output folder and the batch size of the run", _STATE,
        "StateTracker.get_args", "cls", needed=False,
    ),
    Point(
        "state.data_backends", "the datasets and caches of the run", _STATE, "StateTracker.get_data_backends",
        "cls, _type=..., _types=...",
    ),
    Point(
        "config.load", "raw-config capture, whatever the format", _LOADER, "load_config", "args=..., exit_on_error=...",
        needed=False,
    ),
    Point("config.helpers", "the readers by format", _LOADER, "helpers"),
    Point("config.json_mapping", "raw-config capture from JSON", _JSON, "mapping_to_cli_args", imported=True),
    Point("config.toml_mapping", "raw-config capture from TOML", _TOML, "mapping_to_cli_args", imported=True),
    Point(
        "config.mapping", "raw-config capture: a config becomes arguments", _CLI_UTILS, "mapping_to_cli_args",
        "mapping, *, transform=..., extras=...",
    ),
    Point("config.json", "raw-config capture from JSON", _JSON, "load_json_config", "", needed=False),
    Point(
        "config.json_arguments", "values of ours kept out of upstream's arguments", _JSON,
        "normalize_args", "args_dict", needed=False,
    ),
    Point("config.toml", "raw-config capture from TOML", _TOML, "load_toml_config", "", needed=False),
    Point("config.env", "raw-config capture from an env file", _ENV, "load_env_config", "", needed=False),
    Point(
        "config.command_line", "options of ours kept out of upstream's strict parser", _ARGUMENTS, "parse_cmdline_args",
        "input_args=..., exit_on_error=...", needed=False,
    ),
    Point(
        "config.field_registry", "options of ours known to upstream's parser", _FIELDS,
        "FieldRegistry._add_field", "self, field", needed=False,
    ),
)  # fmt: skip

DATA: Final = (
    Point(
        "data.load_configuration", "`type: in_memory` datasets, presented to upstream as local ones", _FACTORY,
        "FactoryRegistry.load_configuration", "self",
    ),
    Point(
        "data.create_backend", "`type: in_memory` datasets, built by id", f"{_BUILDERS}.local",
        "LocalBackendBuilder._create_backend", "self, config",
    ),
    Point(
        "data.torch_load", "cache files answered from memory", _LOCAL,
        "LocalDataBackend.torch_load", "self, filename",
    ),
    Point(
        "data.torch_save", "cache files kept in memory as they are written", _LOCAL, "LocalDataBackend.torch_save",
        "self, data, original_location",
    ),
    Point(
        "data.write", "what is in memory follows what is written", _LOCAL,
        "LocalDataBackend.write", "self, filepath, data",
    ),
    Point("data.exists", "what is in memory is there", _LOCAL, "LocalDataBackend.exists", "self, filepath"),
    Point(
        "data.read", "images and captions read from memory", _LOCAL,
        "LocalDataBackend.read", "self, filepath, as_byteIO=...",
    ),
    Point("data.class", "the class our backend is made of", _LOCAL, "LocalDataBackend"),
    Point("data.load_image", "images decoded from memory", _LOCAL, "load_image", imported=True),
    Point("data.load_video", "clips decoded from memory", _LOCAL, "load_video", imported=True),
    Point("data.image_decoder", "images decoded from memory", _IMAGES, "load_image", "img_data", needed=False),
    Point("data.video_decoder", "clips decoded from memory", _IMAGES, "load_video", "vid_data", needed=False),
    Point(
        "data.from_representation", "`type: in_memory` datasets in a worker process", _LOCAL,
        "LocalDataBackend.from_instance_representation", "representation",
    ),
    Point(
        "data.read_image", "images read from memory", _LOCAL, "LocalDataBackend.read_image",
        "self, filepath, delete_problematic_images=...", needed=False,
    ),
    Point(
        "data.read_image_batch", "images read from memory", _LOCAL, "LocalDataBackend.read_image_batch",
        "self, filepaths, delete_problematic_images=...", needed=False,
    ),
    Point("data.open_file", "files opened from memory", _LOCAL, "LocalDataBackend.open_file", "self, filepath, mode"),
    Point(
        "data.list_files", "what is in memory, listed", _LOCAL, "LocalDataBackend.list_files",
        "self, file_extensions, instance_data_dir",
    ),
    Point(
        "data.delete", "what is in memory follows what is deleted", _LOCAL,
        "LocalDataBackend.delete", "self, filepath",
    ),
    Point(
        "data.instance", "a dataset in memory handed to another process", _LOCAL,
        "LocalDataBackend.get_instance_representation", "self", needed=False,
    ),
    Point(
        "data.from_instance", "a dataset in memory taken up by another process", _FACTORY,
        "from_instance_representation", "representation", needed=False,
    ),
    Point(
        "data.primary_backend", "which datasets are trained on", _FACTORY, "_is_primary_training_backend", "backend",
        needed=False,
    ),
    Point(
        "data.configure", "the datasets of a run, built", _FACTORY,
        "FactoryRegistry.configure", "self, data_backend_config=...", needed=False,
    ),
    Point(
        "data.backend_config", "a dataset's block, read", _BACKEND_CONFIG,
        "create_backend_config", "backend_dict, args",
        needed=False,
    ),
    Point(
        "data.builder", "a dataset's builder, by type", _BUILDERS, "create_backend_builder",
        "backend_type, accelerator, args=...", needed=False,
    ),
    Point(
        "data.fetcher", "look-ahead: the batch after this one", _FETCHER,
        "BatchFetcher.next_response", "self, step", needed=False,
    ),
    Point(
        "data.iterator", "look-ahead: the batch after this one", _ITERATOR, "random_dataloader_iterator",
        "step, backends", needed=False,
    ),
)  # fmt: skip

SOUND_AND_MODELS: Final = (
    Point("audio.name", "sounds decoded from memory", _SOUND, "load_audio", imported=True, needed=False),
    Point(
        "audio.video_name", "soundtracks decoded from memory", _SOUND, "load_audio_from_video", imported=True,
        needed=False,
    ),
    Point("audio.load", "sound decoded from memory", _AUDIO, "load_audio", "source"),
    Point(
        "audio.from_video", "the sound of clips decoded from memory", _AUDIO,
        "load_audio_from_video", "source",
    ),
    Point(
        "vae_cache.audio", "latents of sound kept in memory", _VAE, "VAECache.process_audio_latents",
        "self, latents_uncached", needed=False,
    ),
    Point(
        "models.register", "model families registered with upstream", _MODELS,
        "ModelRegistry.register", "cls, family, model_class", needed=False,
    ),
)  # fmt: skip

POINTS: Final = (*TRAINER, *CACHES, *STATE_AND_CONFIG, *DATA, *SOUND_AND_MODELS)
