"""Every option acts: changing it changes what a run would do, or it is in a short list with the reason.

An option belongs to a probe (`option_probes`): a part of a run, asked without training where that shows it. The table
says for each option what it is changed to, and what else is set on both sides (the switch it belongs to).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gracetune.config.run_config import RunConfig, Training
from runs import option_probes as probes
from runs.option_probes import Probe, digest, make_files
from unit.config.test_options import options

REPOSITORY = Path(__file__).parents[2]
REVIEWED: dict[str, str] = {
    "model.revision": "needs a download: covered by tests/unit/models/test_source.py",
    "datasets[].local_copy.subset": "needs a hub: covered by tests/unit/data/copies/test_hub_datasets.py::"
    "test_subsets_of_the_dataset_card",
    "datasets[].storage.endpoint_url": "needs a bucket: covered by tests/unit/data/copies/test_s3.py::"
    "test_a_folder_of_a_bucket",
    "datasets[].storage.region": "needs a bucket: covered by tests/unit/data/copies/test_s3.py::"
    "test_options_of_the_library",
    "datasets[].storage.anonymous": "needs a bucket: covered by tests/unit/data/copies/test_s3.py::"
    "test_rejected_requests",
    "datasets[].storage.access_key_id": "needs a bucket: covered by tests/unit/data/copies/test_s3.py::"
    "test_a_folder_of_a_bucket",
    "datasets[].storage.secret_access_key": "needs a bucket: covered by tests/unit/data/copies/test_s3.py::"
    "test_a_folder_of_a_bucket",
    "datasets[].storage.session_token": "needs a bucket: covered by tests/unit/data/copies/test_s3.py::"
    "test_options_of_the_library",
    "datasets[].storage.token": "needs a hub: covered by tests/unit/data/copies/test_hub_datasets.py::"
    "test_a_missing_and_a_private_dataset",
    "datasets[].storage.user": "needs a web server: covered by tests/unit/data/copies/test_web.py::"
    "test_passwords_and_signatures_are_used_and_shown_nowhere",
    "datasets[].storage.password": "needs a web server: covered by tests/unit/data/copies/test_web.py::"
    "test_passwords_and_signatures_are_used_and_shown_nowhere",
    "datasets[].storage.signature": "needs a web server: covered by tests/unit/data/copies/test_web.py::"
    "test_passwords_and_signatures_are_used_and_shown_nowhere",
    "checkpoints.push_to_hub.repo_id": "needs a hub: covered by tests/runs/test_remote_data.py::"
    "test_from_a_hub_to_a_hub",
    "checkpoints.for_program": "rejects files or does not: covered by tests/unit/train/test_export_checks.py::"
    "test_files_for_one_program",
    "checkpoints.push_to_hub.private": "needs a hub: covered by tests/unit/hub/test_upload.py::"
    "test_the_repository_is_created_as_configured",
    "checkpoints.push_to_hub.every_checkpoint": "needs a hub: covered by tests/runs/test_remote_data.py::"
    "test_from_a_hub_to_a_hub",
    "logging.project": "needs wandb: covered by tests/unit/telemetry/test_sinks.py::TestWandb",
    "optimizer.rates_from": "needs ai-toolkit's optimizer.pt and a whole run: covered by tests/runs/test_dialects.py::"
    "test_learning_rates_of_an_ai_toolkit_run_are_taken_over",
    "model.assistant_adapter": "needs a LoRA of the model and whole runs: covered by tests/runs/test_assistant.py::"
    "test_training_is_that_of_a_base_with_the_assistant_merged",
    "memory.uvm_access_pattern": "GPU only: covered by tests/gpu/test_managed_gpu.py::"
    "test_overflow_serves_backward_and_small_requests",
}
"""Options whose effect no probe on a CPU shows, each with the test that covers it."""

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Changes:
    probe: Probe
    base: str
    given: Values
    """Settings of both configs that are compared."""
    changed: Values
    long: bool = False
    """Whether the changes need complete runs (`make test-full`)."""


@dataclass(frozen=True)
class Change:
    option: str
    value: Any
    of: Changes = field(repr=False)


PAIRED = {"id": "pictures", "path": "{files}/pictures", "resolution": 64.0, "corrupt_threshold": 0.5}
IMAGES = {"id": "pictures", "path": "{files}/pictures", "resolution": 64.0}
BASES: dict[str, dict[str, Any]] = {
    "sdxl": {"model": {"family": "sdxl", "flavour": "base-1.0", "path": "{sdxl:base-1.0}"}, "datasets": [IMAGES]},
    "wan": {"model": {"family": "wan", "flavour": "t2v-14b-2.2", "path": "{wan:t2v-14b-2.2}"},
            "datasets": [{"id": "clips", "path": "{files}/clips", "dataset_type": "video", "resolution": 48.0,
                          "video": {"num_frames": 5}}]},
    "flux": {"model": {"family": "flux", "flavour": "dev", "path": "{flux:dev}"}, "datasets": [IMAGES]},
    "kontext": {"model": {"family": "flux", "flavour": "kontext", "path": "{flux:kontext}"}, "datasets": [
        {**IMAGES, "canny_reference": {}}]},
    "audio": {"model": {"family": "stable_audio", "flavour": "open-1.0", "path": "{stable_audio:open-1.0}"},
              "datasets": [{"id": "sounds", "path": "{files}/sounds", "dataset_type": "audio",
                            "audio": {"duration_interval": 1.0}}]},
    "planned": {"model": {"family": "wan", "flavour": "t2v-14b-2.2"},
                "datasets": [{**IMAGES, "resolution": 512.0}], "memory": {"use_uvm": True}},
}  # fmt: skip
TABLE = {
    "strategy": "csv",
    "table": {
        "path": "plain.csv",
        "filename_column": "file",
        "caption_column": "text",
        "width_column": "w",
        "height_column": "h",
    },
}
QUERIES = "down_blocks.*.attentions.*.transformer_blocks.*.attn1.to_q"
PROMPT = {"prompt": "a cat"}
ONE = "datasets[0]"
FEW = {**IMAGES, "path": "{files}/few"}
RUN: dict[str, Any] = {"training.max_steps": 4, "datasets": [FEW]}

CHANGES = [
    # -- datasets
    Changes(probes.data, "sdxl", {}, {
        "datasets[].id": "others",
        "datasets[].path": "{files}/references",
        "datasets[].type": "in_memory",
        "datasets[].resolution": 96.0,
        "datasets[].resolution_type": "pixel",
        "datasets[].buckets.rule": "at_most",
        "datasets[].buckets.multiple": 8,
        "datasets[].minimum_size": 70.0,
        "datasets[].minimum_edge": 65.0,
        "datasets[].minimum_aspect_ratio": 0.9,
        "datasets[].maximum_aspect_ratio": 1.2,
        "datasets[].crop.enabled": True,
        "datasets[].captions.strategy": "filename",
        "datasets[].captions.extension": "caption",
        "datasets[].captions.default": "a default",
        "datasets[].captions.trigger_word": "sks",
        "datasets[].captions.split_lines": False,
        "datasets[].captions.dropout": 0.5,
        "datasets[].captions.shuffle_tags": True,
        "datasets[].augmentation.flip_x": True,
        "datasets[].augmentation.flip_y": True,
        "datasets[].augmentation.transforms": [{"method": "Blur"}],
        "datasets[].repeats": 1,
        "datasets[].batch_size": 3,
        "datasets[].max_samples": 4,
        "datasets[].held_out": 2,
        "datasets[].loss_weight": 2.0,
        "training.batch_size": 3,
        "training.seed": 9,
    }),
    Changes(probes.data, "sdxl", {f"{ONE}.resolution": 100.0, f"{ONE}.path": "{files}/alike"}, {
        "datasets[].buckets.aspect_decimals": 1,
    }),
    Changes(probes.data, "sdxl", {f"{ONE}.path": "{files}/kohya"}, {"datasets[].kohya_folders": False}),
    Changes(probes.data, "sdxl", {f"{ONE}.captions.default": "a default"}, {
        "datasets[].captions.default_for_empty": True,
    }),
    Changes(probes.data, "sdxl", {f"{ONE}.captions.trigger_word": "sks"}, {"datasets[].captions.add_trigger": False}),
    Changes(probes.data, "sdxl", {f"{ONE}.captions.dropout": 0.5}, {
        "datasets[].captions.dropped_caption": "sks",
    }),
    Changes(probes.data, "sdxl", {"training.batch_size": 3}, {"training.fill_batches": True}),
    Changes(probes.data, "sdxl", {f"{ONE}.type": "in_memory"}, {
        "datasets[].in_memory.compression": "zstd",
        "datasets[].in_memory.num_workers": 3,
        "datasets[].in_memory.file_extensions": ["jpg"],
    }),
    Changes(probes.data, "sdxl", {"datasets": [IMAGES, {**IMAGES, "id": "more", "path": "{files}/references"}]}, {
        "datasets[].disabled": True,
        "datasets[].dataset_type": "eval",
        "datasets[].probability": 5.0,
        "datasets[].start_epoch": 2,
        "datasets[].end_epoch": 1,
        "datasets[].start_step": 2,
        "datasets[].end_step": 2,
        "datasets[].even_steps": True,
        "datasets[].turn": 0,
    }),
    Changes(probes.data, "sdxl", {"datasets": [IMAGES, {**IMAGES, "id": "few", "path": "{files}/few"}]}, {
        "training.dataset_weights": "equal",
    }),
    Changes(probes.data, "sdxl", {f"{ONE}.maximum_size": 80.0, f"{ONE}.downsample_to": 72.0,
                                  f"{ONE}.crop.enabled": True}, {
        "datasets[].maximum_size": 250.0,
        "datasets[].downsample_to": 78.0,
        "datasets[].crop.style": "corner",
        "datasets[].crop.aspect": "preserve",
    }),
    Changes(probes.data, "sdxl", {f"{ONE}.crop": {"enabled": True, "aspect": "closest", "aspect_buckets": [1.0]},
                                  f"{ONE}.resolution": 256.0}, {
        "datasets[].crop.aspect_buckets": [1.0, 1.5],
    }),
    Changes(probes.data, "sdxl", {f"{ONE}.captions.strategy": "instanceprompt", f"{ONE}.captions.instance_prompt": "x"},
            {"datasets[].captions.instance_prompt": "another"}),
    Changes(probes.data, "sdxl", {f"{ONE}.captions.instance_prompt": "x"},
            {"datasets[].captions.prepend_instance_prompt": True}),
    Changes(probes.data, "sdxl", {f"{ONE}.captions.shuffle_tags": True}, {
        "datasets[].captions.keep_tags": 2,
        "datasets[].captions.shuffle_variants": 3,
        "datasets[].captions.shuffle_written": False,
        "datasets[].captions.tag_separator": " ",
    }),
    Changes(probes.data, "sdxl", {f"{ONE}.captions": {"shuffle_tags": True, "trigger_word": "sks"}}, {
        "datasets[].captions.shuffle_trigger": True,
    }),
    Changes(probes.data, "sdxl", {f"{ONE}.captions": TABLE}, {
        "datasets[].captions.table.path": "second.csv",
        "datasets[].captions.table.filename_column": "other",
        "datasets[].captions.table.caption_column": "other",
        "datasets[].captions.table.fallback_caption_column": "other",
        "datasets[].captions.table.identifier_includes_extension": False,
        "datasets[].captions.table.width_column": "h",
        "datasets[].captions.table.height_column": "w",
    }),
    Changes(probes.data, "sdxl", {f"{ONE}.augmentation.transforms": [{"method": "Blur"}]}, {
        "datasets[].augmentation.cache_mode": "static",
    }),
    Changes(probes.data, "sdxl", {f"{ONE}.mask.path": "{files}/masks"}, {
        "datasets[].mask.path": "{files}/references",
        "datasets[].mask.min_weight": 0.3,
        "datasets[].mask.invert": True,
    }),
    Changes(probes.data, "sdxl", {f"{ONE}.path": "{files}/alpha"}, {"datasets[].mask.from_alpha": True}),
    Changes(probes.data, "sdxl", {f"{ONE}.path": "{files}/damaged", f"{ONE}.corrupt_threshold": 0.6},
            {"datasets[].corrupt_threshold": 0.1}),
    Changes(probes.data, "sdxl", {f"{ONE}.type": "in_memory"}, {"datasets[].in_memory.memory_limit_gb": 1e-9}),
    Changes(probes.data, "sdxl", {"datasets": [PAIRED, {**IMAGES, "id": "references", "path": "{files}/references",
                                               "dataset_type": "conditioning"}]}, {
        "datasets[].conditioning": ["references"],
    }),
    Changes(probes.data, "sdxl", {"datasets": [
        {**IMAGES, "id": "references", "path": "{files}/references", "dataset_type": "conditioning"}, PAIRED]},
        {"datasets[].source_dataset_id": "pictures"}),
    Changes(probes.data, "sdxl", {"datasets": [
        {**IMAGES, "id": "references", "path": "{files}/references", "dataset_type": "conditioning",
         "source_dataset_id": "pictures"}, PAIRED]}, {"datasets[].conditioning_type": "mask"}),
    Changes(probes.data, "kontext", {}, {
        "datasets[].canny_reference.low_threshold": 20.0,
        "datasets[].canny_reference.high_threshold": 200.0,
    }),
    Changes(probes.local_copy, "sdxl", {f"{ONE}.path": "{files}/archives", f"{ONE}.local_copy": {}}, {
        "datasets[].local_copy.folder": "{root}/copies",
        "datasets[].local_copy.format": "files",
        "datasets[].local_copy.split": "test",
        "datasets[].local_copy.media_column": "other.png",
        "datasets[].local_copy.index": "{files}/indexes",
    }),
    Changes(probes.local_copy, "sdxl", {f"{ONE}.path": "{files}/archives", f"{ONE}.local_copy": {"filter": [
        {"column": "score", "minimum": 1, "one_of": ["0", "1", "2"]}]}}, {
        "datasets[].local_copy.filter[].column": "weight",
        "datasets[].local_copy.filter[].minimum": 2,
        "datasets[].local_copy.filter[].one_of": ["1"],
    }),
    Changes(probes.local_copy, "sdxl", {f"{ONE}.path": "{files}/archives",
                                        f"{ONE}.local_copy": {"tile": {"count": 2, "index": 0}}}, {
        "datasets[].local_copy.tile.count": 3,
        "datasets[].local_copy.tile.index": 1,
    }),
    Changes(probes.data, "wan", {}, {
        "datasets[].video.num_frames": 9,
        "datasets[].video.fps": 12.0,
        "datasets[].video.min_frames": 20,
        "datasets[].video.max_frames": 40,
        "datasets[].video.clip": "uniform",
        "datasets[].video.whole_clip": True,
        "datasets[].video.from_length": True,
        "datasets[].video.frame_choice": "numbers",
    }),
    Changes(probes.data, "wan", {f"{ONE}.video.num_frames": 33}, {"datasets[].video.allow_shorter": True}),
    Changes(probes.data, "wan", {f"{ONE}.video": {"num_frames": 81, "allow_shorter": True}}, {
        "datasets[].video.frame_step": 8,
    }),
    Changes(probes.data, "wan", {f"{ONE}.video": {"from_length": True}}, {"datasets[].video.frame_interval": 12}),
    Changes(probes.data, "wan", {f"{ONE}.video": {}}, {"datasets[].video.bucket_strategy": "resolution_frames"}),
    Changes(probes.data, "audio", {}, {
        "datasets[].audio.sample_rate": 22_050,
        "datasets[].audio.channels": 1,
        "datasets[].audio.duration_interval": 2.0,
        "datasets[].audio.max_duration_seconds": 2.0,
        "datasets[].audio.truncation": "end",
    }),
    # -- caches
    Changes(probes.caches, "sdxl", {}, {
        "datasets[].cache_dir": "{root}/own",
        "cache.cache_dir": "{root}/elsewhere",
        "cache.text_cache_dir": "{root}/texts",
        "cache.vae_cache_dir": "{root}/latents",
        "model.vae_tiling": True,
        "model.vae_slicing": True,
        "training.mixed_precision": "bf16",
    }),
    Changes(probes.caches, "sdxl", {f"{ONE}.cache_latents": "disk"}, {"datasets[].cache_latents": "none"}),
    # -- the model
    Changes(probes.model, "wan", {}, {
        "model.family": "sdxl",
        "model.flavour": "i2v-14b-2.2",
        "model.experts": "low",
        "model.switch_experts_every": 2,
        "model.expert_boundary": 0.5,
        "model.vae_path": "{wan:t2v-14b-2.1}/vae",
        "model.text_encoder_path": "{wan:t2v-14b-2.1}/text_encoder",
        "model.variant": "fp16",
        "datasets[].video.image_to_video": True,
    }),
    Changes(probes.model, "wan", {"model.flavour": None}, {"model.path": "{wan:ti2v-5b-2.2}"}),
    # -- the adapter
    Changes(probes.adapter, "sdxl", {"adapter.targets": [QUERIES, "down_blocks.*.resnets.*.conv1"]}, {
        "adapter.kind": "dora",
        "adapter.rank": 8,
        "adapter.alpha": 1.0,
        "adapter.dropout": 0.5,
        "adapter.conv_rank": 2,
        "adapter.conv_alpha": 1.0,
        "adapter.targets": [QUERIES],
        "adapter.exclude": ["down_blocks.1.*"],
        "adapter.strength": 0.5,
        "adapter.init_from": "{adapter}",
    }),
    Changes(probes.adapter, "sdxl", {"adapter.kind": "lokr"}, {
        "adapter.factor": 2,
        "adapter.within": ["mid_block", "attentions.0"],
        "adapter.by_module": {"Attention": {"algo": "lora"}},
    }),
    Changes(probes.adapter, "sdxl", {"adapter.kind": "lokr", "adapter.rank": 1, "adapter.factor": 4},
            {"adapter.decompose_both": True, "adapter.full_rank": True}),
    # -- learning
    Changes(probes.optimizer, "sdxl", {"optimizer.lr": 1e-3}, {
        "optimizer.name": "lion",
        "optimizer.lr": 2e-3,
        "optimizer.weight_decay": 0.5,
        "optimizer.betas": [0.5, 0.9],
        "optimizer.eps": 0.1,
        "optimizer.options": {"amsgrad": True},
        "schedule.name": "linear",
    }),
    Changes(probes.optimizer, "sdxl", {"optimizer.name": "automagic", "optimizer.lr": 1e-4}, {
        f"optimizer.{part}.{name}": value
        for part in ("limits", "high_noise", "low_noise")
        for name, value in (("lr_bump", 3e-5), ("min_lr", 2e-4), ("max_lr", 1.001e-4))
    }),
    Changes(probes.optimizer, "sdxl", {"schedule.name": "polynomial"}, {
        "schedule.warmup_steps": 5,
        "schedule.power": 2.0,
        "schedule.end_lr": 1e-5,
    }),
    Changes(probes.optimizer, "sdxl", {"schedule.name": "cosine_with_restarts"}, {"schedule.cycles": 2.0}),
    Changes(probes.optimizer, "sdxl", {"schedule.name": "sine"}, {"schedule.half_period": 3}),
    Changes(probes.objective, "flux", {}, {
        "objective.loss": "mae",
        "objective.flow_shift": 5.0,
        "objective.timesteps": "uniform",
        "objective.timestep_bias": "style",
        "objective.sigmoid_scale": 2.0,
        "objective.min_timestep": 300,
        "objective.max_timestep": 700,
        "objective.noise_offset": 0.1,
        "objective.input_perturbation": 0.1,
        "objective.guidance": 3.5,
        "objective.shift_terminal": 0.02,
        "objective.timestep_weights": "measured",
        "objective.stratified": True,
    }),
    Changes(probes.objective, "flux", {"objective.flow_shift": "resolution", "objective.resolution_shift": {}}, {
        "objective.resolution_shift.base_image_seq_len": 32,
        "objective.resolution_shift.base_shift": 0.7,
        "objective.resolution_shift.max_image_seq_len": 8192,
        "objective.resolution_shift.max_shift": 0.9,
    }),
    Changes(probes.objective, "wan", {"objective.timestep_bias": "style"}, {
        "objective.timestep_bias_over": "noise_range",
    }),
    Changes(probes.objective, "sdxl", {"objective.loss": "huber"}, {
        "objective.huber_delta": 1.0,
        "objective.huber_schedule": "snr",
    }),
    Changes(probes.objective, "sdxl", {}, {
        "objective.prediction": "v_prediction",
        "objective.snr_gamma": 5.0,
        "objective.debiased": True,
    }),
    Changes(probes.objective, "sdxl", {"objective.snr_gamma": 5.0}, {"objective.soft_min_snr": True}),
    Changes(probes.objective, "sdxl", {"objective.noise_offset": 0.1}, {"objective.noise_offset_probability": 0.3}),
    Changes(probes.objective, "flux", {"objective.timesteps": "beta"},
            {"objective.beta_alpha": 4.0, "objective.beta_beta": 4.0}),
    Changes(probes.learning, "sdxl", {"training.max_grad_norm": 1.0}, {
        "training.gradient_accumulation_steps": 2,
        "training.accumulation": "sum",
        "training.max_grad_norm": 0.5,
        "training.grad_clip": "value",
        "training.ema.enabled": True,
    }),
    Changes(probes.learning, "sdxl", {"training.ema.enabled": True}, {
        "training.ema.decay": 0.5,
        "training.ema.update_every": 2,
        "training.ema.ramp": True,
        "training.ema.copy_until": 3,
    }),
    Changes(probes.learning, "sdxl", {"training.ramp": {"initial_effective_batch_size": 2, "batch_rampup_steps": 10,
                                                        "target_effective_batch_size": 8}},
            {"training.ramp.enabled": True}),
    Changes(probes.learning, "sdxl", {"training.ramp": {"enabled": True, "initial_effective_batch_size": 2,
                                                        "batch_rampup_steps": 10, "target_effective_batch_size": 8}}, {
        "training.ramp.initial_effective_batch_size": 4,
        "training.ramp.target_effective_batch_size": 6,
        "training.ramp.batch_rampup_steps": 20,
    }),
    Changes(probes.skipped_tokens, "wan", {"training.token_routing": {
                "routes": [{"skip_ratio": 0.5, "first_block": 0, "last_block": 1}]}}, {
        "training.token_routing.routes[].skip_ratio": 0.25,
        "training.token_routing.routes[].first_block": 1,
        "training.token_routing.routes[].last_block": 0,
    }),
    Changes(probes.length, "sdxl", {}, {"training.max_steps": 7}),
    Changes(probes.length, "sdxl", {"training.max_steps": None, "training.epochs": 2}, {"training.epochs": 3}),
    # -- memory
    Changes(probes.choices, "planned", {}, {
        "training.gradient_checkpointing": "off",
        "training.attention": "math",
        "training.compile": "off",
        "model.base_precision": "fp8",
        "memory.uvm_stage1_threshold": 0.3,
        "memory.uvm_stage1_min_bytes": 2**40,
        "cache.vae_batch_size": 64,
        "cache.text_encoder_batch_size": 64,
    }),
    Changes(probes.plans, "planned", {}, {
        "memory.use_uvm": False,
        "memory.uvm_oversubscription_ratio": 1.01,
    }),
    Changes(probes.plans, "planned", {"adapter.kind": "full_finetune", "optimizer.state.home": "resident"}, {
        "optimizer.state.home": "streamed",
        "optimizer.state.precision": "residual",
    }),
    # -- samples
    Changes(probes.samples, "sdxl", {"validation.prompts": [PROMPT, PROMPT]}, {
        "validation.enabled": False,
        "validation.prompts[].prompt": "a dog",
        "validation.prompts[].negative_prompt": "blur",
        "validation.prompts[].width": 128,
        "validation.prompts[].height": 128,
        "validation.prompts[].num_frames": 5,
        "validation.prompts[].seed": 5,
        "validation.prompts[].guidance": 2.0,
        "validation.prompts[].steps": 3,
        "validation.prompts[].adapter_strength": 0.5,
        "validation.prompts[].references": ["{files}/pictures/00.png"],
        "validation.negative_prompt": "blur",
        "validation.width": 128,
        "validation.height": 128,
        "validation.num_frames": 5,
        "validation.seed": 5,
        "validation.walk_seed": True,
        "validation.guidance": 2.0,
        "validation.guidance_rescale": 0.5,
        "validation.steps": 3,
        "validation.images_per_prompt": 2,
    }),
    # -- whole runs
    Changes(probes.whole_run, "sdxl", RUN, {
        "name": "another",
        "output_dir": "elsewhere",
        "cache.persistent_cache": False,
        "cache.vae_cache_type": "memory",
        "cache.text_cache_type": "memory",
        "checkpoints.every_steps": 2,
        "checkpoints.save_dtype": "fp32",
        "checkpoints.format": "kohya",
        "logging.every_steps": 2,
        "logging.trackers": ["tensorboard"],
        "logging.webhook": "http://127.0.0.1:9/",
        "training.deterministic": True,
        "memory.enable_uvm_hints": True,
        "datasets[].adapter_strength": 0.5,
        "datasets[].regularisation": True,
    }, long=True),
    Changes(probes.whole_run, "sdxl", {**RUN, "datasets": [{**IMAGES, "mask": {"path": "{files}/masks"},
                                                            "captions": {"dropout": 0.5}}]}, {
        "datasets[].mask.normalise": True,
        "model.size_conditioning": "scaled",
        "model.drop_size_conditioning": True,
    }, long=True),
    Changes(probes.whole_run, "sdxl", {**RUN, "checkpoints.every_steps": 1}, {
        "checkpoints.keep_last": 1,
    }, long=True),
    Changes(probes.whole_run, "sdxl", {**RUN, "checkpoints.every_steps": 1, "checkpoints.keep_last": 1}, {
        "checkpoints.keep_every_steps": 2,
    }, long=True),
    Changes(probes.whole_run, "sdxl", {**RUN, "training.batch_size": 2}, {"checkpoints.every_epochs": 1}, long=True),
    Changes(probes.second_run, "sdxl", RUN, {"checkpoints.resume": "none"}, long=True),
    Changes(probes.whole_run, "sdxl", {**RUN, "training.batch_size": 2, "validation.prompts": [PROMPT],
                                       "validation.width": 64, "validation.height": 64, "validation.steps": 1}, {
        "validation.every_steps": 2,
        "validation.every_epochs": 1,
        "validation.at_start": True,
    }, long=True),
    Changes(probes.whole_run, "sdxl", {**RUN, "datasets": [FEW, {**FEW, "id": "held", "dataset_type": "eval"}]}, {
        "validation.loss_every_steps": 2,
    }, long=True),
    Changes(probes.clip_file, "wan", {}, {"validation.fps": 4.0}),
]  # fmt: skip


# -- the check ---------------------------------------------------------------------------------------------------------


def listed() -> Iterator[Change]:
    for group in CHANGES:
        yield from (Change(option, value, group) for option, value in group.changed.items())


class DeadOptionError(AssertionError):
    """A change of an option has no effect."""


@dataclass
class World:
    """The files and models that configs name, and the probes' results for unchanged configs."""

    names: Mapping[str, str]
    tiny_model: Any
    root: Path
    seen: dict[Any, str] = field(default_factory=dict)
    runs: int = 0

    def filled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.filled(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self.filled(one) for one in value]
        if not isinstance(value, str) or "{" not in value:
            return value
        for name, path in self.names.items():
            value = value.replace(f"{{{name}}}", path)
        if value.startswith("{") and ":" in value:
            model, _, rest = value[1:].partition("}")
            return str(self.tiny_model(*model.split(":"))) + rest
        return value

    def config(self, base: str, values: Values, kind: type[RunConfig] = RunConfig) -> RunConfig:
        self.runs += 1
        document: dict[str, Any] = {
            "name": "tiny",
            "output_dir": "out",
            "training": {"max_steps": 20, "mixed_precision": "fp32", "seed": 3},
            "checkpoints": {"every_steps": None},
            "logging": {"every_steps": 1, "trackers": []},
        }
        document = _merged(document, self.filled(BASES[base]))
        if "path" in document["model"]:
            document["model"].setdefault("base_precision", "fp32")
        for path, value in values.items():
            _put(document, path, self.filled(value))
        return kind.model_validate(document)

    def digest(self, probe: Probe, config: RunConfig) -> str:
        from gracetune.errors import GracetuneError

        try:
            return digest(probe(config))
        except GracetuneError as error:
            return f"refused: {error}"

    def check(self, change: Change, kind: type[RunConfig] = RunConfig) -> None:
        group = change.of
        key = (id(group), kind)
        if key not in self.seen:
            base = self.config(group.base, group.given, kind)
            first = self.digest(group.probe, base)
            assert not first.startswith("refused"), first
            assert self.digest(group.probe, base) == first, f"{group.probe.__name__} varies by itself"
            self.seen[key] = first
        changed = self.config(group.base, {**group.given, change.option.replace("[]", "[0]"): change.value}, kind)
        found = self.digest(group.probe, changed)
        if found == self.seen[key]:
            raise DeadOptionError(
                f"{change.option} = {change.value!r} changes nothing that {group.probe.__name__} shows"
            )
        if found.startswith("refused") and change.option not in REJECTIONS:
            raise AssertionError(f"{change.option} = {change.value!r} is {found}")


REJECTIONS = ("datasets[].corrupt_threshold", "datasets[].in_memory.memory_limit_gb", "model.variant", "model.family",
            "model.flavour", "checkpoints.resume")  # fmt: skip
"""Options whose effect is that the run is rejected."""


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(one[key], other[key]) for key in one.keys() & other.keys() if isinstance(other[key], dict)}
    return {**one, **other, **both}


def _put(document: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.replace("[0]", ".0").split(".")
    node: Any = document
    for step in above:
        node = node[int(step)] if step.isdigit() else node.setdefault(step, {})
    node[last] = value


@pytest.fixture(scope="module")
def world(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("options")
    files = make_files(root / "files")
    patch = pytest.MonkeyPatch()
    patch.chdir(root)  # `output_dir` is a relative folder
    made = World(
        {"files": str(files), "root": str(root), "adapter": str(root / "adapter.safetensors")}, tiny_model, root
    )
    given = next(one.given for one in CHANGES if "adapter.init_from" in one.changed)
    probes.write_adapter(made.config("sdxl", given), root / "adapter.safetensors")
    yield made
    patch.undo()


def _named(change: Change) -> Any:
    return pytest.param(change, id=change.option, marks=[pytest.mark.full] if change.of.long else [])


@pytest.mark.parametrize("change", [_named(change) for change in listed()])
def test_the_option_acts(world: World, change: Change) -> None:
    world.check(change)


def test_every_option_is_asked_or_reviewed() -> None:
    requested = [change.option for change in listed()]
    assert len(requested) == len({*requested}), "an option is asked twice"
    assert not {*requested} & REVIEWED.keys()
    assert sorted([*requested, *REVIEWED]) == sorted(options(RunConfig))


@pytest.mark.parametrize("option", REVIEWED)
def test_what_is_reviewed_names_a_test_that_exists(option: str) -> None:
    place, _, name = REVIEWED[option].rpartition("covered by ")[2].partition("::")
    text = (REPOSITORY / place).read_text()
    assert not name or f"def {name}(" in text or f"class {name}" in text


class WithADeadOption(Training):
    unread: int = 0


class DeadConfig(RunConfig):
    training: WithADeadOption = WithADeadOption()


PROBED = {group.probe: group for group in CHANGES}


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(one, id=probe.__name__, marks=[pytest.mark.full] if one.long else [])
        for probe, one in PROBED.items()
    ],
)
def test_an_option_that_nobody_reads_fails(world: World, group: Changes) -> None:
    """No probe shows it, because none of them includes the config itself."""
    with pytest.raises(DeadOptionError, match=r"training\.unread = 1 changes nothing"):
        world.check(Change("training.unread", 1, group), DeadConfig)


def test_an_option_without_an_entry_is_noticed() -> None:
    known = {*REVIEWED, *(change.option for change in listed())}
    assert {*options(DeadConfig)} - known == {"training.unread"}
