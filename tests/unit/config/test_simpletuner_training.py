"""Training and validation options of a SimpleTuner config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.config.run_config import PushToHub, RunConfig
from unit.config.simpletuner_files import IMAGES, problems, resolve, write

SDXL = {"model_family": "sdxl", "model_flavour": "base-1.0"}


def config(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> RunConfig:
    return resolve(folder, changes, **options).config


def test_defaults_that_change_what_is_learned_are_simpletuners(tmp_path: Path) -> None:
    resolved = resolve(tmp_path)
    found = resolved.config
    assert (found.training.batch_size, found.training.max_grad_norm, found.training.grad_clip) == (4, 2.0, "value")
    assert (found.optimizer.lr, found.schedule.name) == (4e-7, "constant_with_warmup")
    assert found.objective.flow_shift == 3
    assert found.datasets[0].captions.dropout == 0.1
    assert (found.optimizer.betas, found.optimizer.eps, found.optimizer.weight_decay) == ((0.9, 0.999), 1e-6, 0.01)
    assert str(resolved.origins["training", "batch_size"]) == "default SimpleTuner train_batch_size"


@pytest.mark.parametrize(
    ("name", "value", "path", "expected"),
    [
        ("gradient_checkpointing", True, "training.gradient_checkpointing", "full"),
        ("gradient_checkpointing", "false", "training.gradient_checkpointing", "off"),
        ("max_grad_norm", 0, "training.max_grad_norm", None),
        ("dynamo_backend", "no", "training.compile", "off"),
        ("dynamo_backend", "inductor", "training.compile", "on"),
        ("attention_mechanism", "diffusers", "training.attention", "sdpa"),
        ("attention_mechanism", "flash_attn_3", "training.attention", "flash_attn_3"),
        ("attention_mechanism", "flash-attn-3-hub", "training.attention", "flash_attn_3"),
        ("attention_mechanism", "xformers", "training.attention", "auto"),
        ("attention_mechanism", "sageattention", "training.attention", "auto"),
        ("seed", 0, "training.seed", 42),
        ("checkpoint_step_interval", 0, "checkpoints.every_steps", None),
        ("checkpoint_epoch_interval", 2, "checkpoints.every_epochs", 2),
        ("loss_type", "l2", "objective.loss", "mse"),
        ("snr_gamma", 0, "objective.snr_gamma", None),
        ("flow_schedule_shift", 0, "objective.flow_shift", 1.0),
        ("flow_schedule_shift", 4.5, "objective.flow_shift", 4.5),
        ("flow_use_beta_schedule", True, "objective.timesteps", "beta"),
        ("flow_use_uniform_schedule", True, "objective.timesteps", "uniform"),
        ("flow_sigmoid_scale", 0.5, "objective.sigmoid_scale", 0.5),
        ("report_to", "wandb,tensorboard", "logging.trackers", ("tensorboard", "wandb")),
        ("report_to", "none", "logging.trackers", ()),
        ("cache_dir", "c", "cache.cache_dir", "c"),
        ("lr_scheduler", "cosine_with_warmup", "schedule.name", "cosine"),
        ("vae_enable_tiling", True, "model.vae_tiling", True),
        ("tracker_project_name", "p", "logging.project", "p"),
    ],
)  # fmt: skip
def test_values(tmp_path: Path, name: str, value: Any, path: str, expected: Any) -> None:
    found: Any = config(tmp_path, {name: value})
    for part in path.split("."):
        found = getattr(found, part)
    assert found == expected


def test_auto_shift_wins_over_a_fixed_one(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, {"flow_schedule_auto_shift": True, "flow_schedule_shift": 3})
    assert resolved.config.objective.flow_shift == "resolution"
    assert any("flow_schedule_shift" in note for note in resolved.notes)


def test_sdxl_draws_its_timesteps_evenly_and_offsets_noise_behind_a_switch(tmp_path: Path) -> None:
    found = config(tmp_path, {**SDXL, "noise_offset": 0.05, "flow_schedule_shift": 3}, datasets=IMAGES).objective
    assert (found.timesteps, found.noise_offset, found.flow_shift) == ("uniform", 0.0, None)
    found = config(tmp_path, {**SDXL, "offset_noise": True, "noise_offset": 0.05}).objective
    assert (found.noise_offset, found.noise_offset_probability) == (0.05, 0.25)
    assert config(tmp_path, {**SDXL, "prediction_type": "v_prediction"}).objective.prediction == "v_prediction"
    assert list(problems(tmp_path, {**SDXL, "prediction_type": "sample"})) == ["prediction_type"]


def test_a_constant_schedule_with_a_warmup_has_one(tmp_path: Path) -> None:
    found = config(tmp_path, {"lr_scheduler": "constant", "lr_warmup_steps": 5}).schedule
    assert (found.name, found.warmup_steps) == ("constant_with_warmup", 5)
    assert config(tmp_path, {"lr_scheduler": "constant"}).schedule.name == "constant"


def test_a_cosine_is_simpletuners_wave_and_one_flag_makes_it_a_fall(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, {"lr_scheduler": "cosine", "lr_warmup_steps": 50})
    found = resolved.config.schedule
    assert (found.name, found.half_period, found.warmup_steps, found.end_lr) == ("cosine", 50, 0, 4e-7)
    assert any("--set schedule.half_period=null" in note for note in resolved.notes)
    assert config(tmp_path, {"lr_scheduler": "cosine"}).schedule.half_period == 1000
    one_fall = resolve(tmp_path, {"lr_scheduler": "cosine"}, overrides=["schedule.half_period=null"])
    assert one_fall.config.schedule.half_period is None


def test_huber_follows_the_noise_level_unless_told_otherwise(tmp_path: Path) -> None:
    assert config(tmp_path, {"loss_type": "huber"}).objective.huber_schedule == "snr"
    found = config(tmp_path, {"loss_type": "huber", "huber_schedule": "constant", "huber_c": 0.2}).objective
    assert (found.loss, found.huber_delta, found.huber_schedule) == ("huber", 0.2, "constant")


def test_sdxl_batches_share_the_timesteps_out_unless_told_otherwise(tmp_path: Path) -> None:
    assert config(tmp_path, SDXL, datasets=IMAGES).objective.stratified
    assert not config(tmp_path, {**SDXL, "disable_segmented_timestep_sampling": True}).objective.stratified
    assert not config(tmp_path, {}).objective.stratified


def test_the_guidance_flux_is_trained_with(tmp_path: Path) -> None:
    flux = {"model_family": "flux", "model_flavour": "dev"}
    assert config(tmp_path, flux, datasets=IMAGES).objective.guidance is None
    assert config(tmp_path, {**flux, "flux_guidance_value": 3.5}).objective.guidance == 3.5
    changes = {**flux, "flux_guidance_mode": "random-range", "flux_guidance_value": 3.5}
    assert list(problems(tmp_path, changes)) == ["flux_guidance_mode"]


@pytest.mark.parametrize(
    ("name", "ours", "decay"),
    [("adamw_bf16", "adamw", 0.01), ("optimi-lion", "lion", 0.0), ("optimi-adamw", "adamw", 0.0),
     ("bnb-adamw8bit", "adamw_8bit", 0.01), ("prodigy", "prodigy_plus_schedule_free", 0.0),
     ("torch-adafactor", "torch_adafactor", 0.0), ("torch-adam", "adamw", 0.0), ("automagic", "automagic", None)],
)  # fmt: skip
def test_optimizers(tmp_path: Path, name: str, ours: str, decay: float | None) -> None:
    optimizer = config(tmp_path, {"optimizer": name}).optimizer
    assert (optimizer.name, optimizer.weight_decay) == (ours, decay)


def test_optimizer_settings(tmp_path: Path) -> None:
    changes = {"optimizer": "prodigy", "optimizer_config": "eps=1e-7,weight_decay=0.1,d_coef=0.5,fused=true",
               "optimizer_beta1": 0.8, "optimizer_beta2": 0.9, "prodigy_steps": 50}  # fmt: skip
    optimizer = config(tmp_path, changes).optimizer
    assert (optimizer.eps, optimizer.weight_decay, optimizer.betas) == (1e-7, 0.1, (0.8, 0.9))
    assert optimizer.options == {"d_coef": 0.5, "prodigy_steps": 50}


@pytest.mark.parametrize(
    ("changes", "key", "hint"),
    [
        ({"optimizer": "soap"}, "optimizer", "adamw_bf16"),
        ({"optimizer": "adamw_bf61"}, "optimizer", "adamw_bf16"),
        ({"optimizer": "torch-adam", "optimizer_config": "weight_decay=0.1"}, "optimizer_config", "adamw_bf16"),
        ({"optimizer_config": "eps"}, "optimizer_config", "eps=1e-6"),
        ({"optimizer_beta1": 0.9}, "optimizer_beta1", "optimizer_beta2"),
        ({"attention_mechanism": "sla"}, "attention_mechanism", "diffusers"),
        ({"attention_mechanism": "flash_atn_3"}, "attention_mechanism", "flash_attn_3"),
        ({"attention_mechanism": "sageattention", "sageattention_usage": "training"}, "sageattention_usage", "remove"),
        ({"mixed_precision": "fp8"}, "mixed_precision", "bf16"),
        ({"lora_type": "loha"}, "lora_type", "standard"),
        ({"model_type": "deepfloyd-full"}, "model_type", "lora"),
        ({"flow_schedule_auto_shift": "perhaps"}, "flow_schedule_auto_shift", "true or false"),
    ],
)
def test_what_is_rejected_names_its_key(tmp_path: Path, changes: dict[str, Any], key: str, hint: str) -> None:
    found = problems(tmp_path, changes)
    assert list(found) == [key]
    assert hint in found[key].hint


def test_uploading(tmp_path: Path) -> None:
    requested = {"push_to_hub": True, "hub_model_id": "https://huggingface.co/a/b/", "push_checkpoints_to_hub": "true"}
    found = config(tmp_path, requested).checkpoints.push_to_hub
    assert found is not None
    assert (found.repo_id, found.private, found.every_checkpoint) == ("a/b", True, True)
    named = config(tmp_path, {"push_to_hub": True, "tracker_project_name": "mine", "model_card_private": False})
    assert named.checkpoints.push_to_hub == PushToHub(repo_id="mine", private=False)
    quiet = resolve(tmp_path, {"push_checkpoints_to_hub": True, "hub_model_id": "a/b"})
    assert quiet.config.checkpoints.push_to_hub is None
    assert any("without effect" in note and "hub_model_id" in note for note in quiet.notes)


def test_validation(tmp_path: Path) -> None:
    write(tmp_path, "prompts.json", {"one": "first", "two": {"caption": "second", "adapter_strength": 0.5}})
    found = config(tmp_path, {
        "validation_prompt": "third", "user_prompt_library": "prompts.json", "validation_resolution": "832x480",
        "validation_step_interval": 50, "validation_seed": 3, "validation_num_video_frames": 81, "framerate": 16,
        "validation_guidance": 5, "validation_num_inference_steps": 40, "num_validation_images": 2,
        "validation_negative_prompt": "", "validation_lycoris_strength": 0.8, "eval_steps_interval": 25,
    }).validation  # fmt: skip
    assert [(p.prompt, p.adapter_strength) for p in found.prompts] == [("first", 0.8), ("second", 0.5), ("third", 0.8)]
    assert (found.width, found.height, found.num_frames, found.fps) == (832, 480, 81, 16)
    assert (found.every_steps, found.guidance, found.steps, found.images_per_prompt) == (50, 5, 40, 2)
    assert (found.negative_prompt, found.loss_every_steps, found.seed) == ("", 25, 3)


@pytest.mark.parametrize(("theirs", "ours"), [(1.0, 1.0), (0.5, 0.5), (4.0, 5.0), (..., 8.5)])
def test_z_images_guidance_counts_from_the_prompts_own_prediction(tmp_path: Path, theirs: Any, ours: float) -> None:
    changes = {"model_family": "z_image", "model_flavour": "base", "validation_guidance": theirs}
    assert config(tmp_path, changes, datasets=IMAGES).validation.guidance == ours


@pytest.mark.parametrize(("theirs", "ours"), [(0.0, 0.0), (0.5, 1.5), (4.5, 5.5), (..., 8.5)])
def test_krea_2s_guidance_counts_from_zero(tmp_path: Path, theirs: Any, ours: float) -> None:
    changes = {"model_family": "krea2", "model_flavour": "raw", "validation_guidance": theirs}
    assert config(tmp_path, changes, datasets=IMAGES).validation.guidance == ours


def test_several_resolutions_are_several_samples(tmp_path: Path) -> None:
    found = config(tmp_path, {"validation_prompt": "p", "validation_resolution": "512x512,1024x768"}).validation
    assert [(p.prompt, p.width, p.height) for p in found.prompts] == [("p", 512, 512), ("p", 1024, 768)]


@pytest.mark.parametrize(
    ("text", "size"), [("1024", 1024), (1024, 1024), ("1", 1024), (1.0, 1024), ("2", 2000), (..., 256)]
)
def test_square_resolutions(tmp_path: Path, text: Any, size: int) -> None:
    found = config(tmp_path, {"validation_resolution": text}).validation
    assert (found.width, found.height) == (size, size)


def test_validation_defaults_and_switches(tmp_path: Path) -> None:
    found = config(tmp_path, {"validation_disable": True, "validation_on_startup": True}).validation
    assert (found.enabled, found.at_start, found.every_steps) == (False, True, 100)
    assert (found.guidance, found.steps, found.negative_prompt) == (7.5, 30, "blurry, cropped, ugly")
    assert config(tmp_path, {"validation_epoch_interval": 1.0}).validation.every_epochs == 1


def test_images_to_start_from(tmp_path: Path) -> None:
    (prompt,) = config(tmp_path, {"validation_input": '[{"path": "a.png", "prompt": "p"}]'}).validation.prompts
    assert (prompt.prompt, prompt.references) == ("p", ("a.png",))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"validation_resolution": "wide"}, "validation_resolution"),
        ({"validation_resolution": "1x2x3"}, "validation_resolution"),
        ({"validation_resolution": {"w": 1}}, "validation_resolution"),
        ({"user_prompt_library": "missing.json"}, "user_prompt_library"),
        ({"validation_input": "start.png"}, "validation_input"),
        ({"validation_input": [{"prompt": "p"}]}, "validation_input[0]"),
        ({"validation_guidance": "strong"}, "validation_guidance"),
    ],
)
def test_mistakes_in_validation(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    assert key in problems(tmp_path, changes)


def test_mistakes_in_a_prompt_library(tmp_path: Path) -> None:
    write(tmp_path, "prompts.json", {"a": {"prompt": "p", "adapter_strenght": 1}, "b": 3, "c": {"text": "x"}})
    found = problems(tmp_path, {"user_prompt_library": "prompts.json"})
    assert found["a.adapter_strenght"].hint == "write `adapter_strength`"
    assert {"b", "c"} <= set(found)


def test_offset_noise_of_batches_is_a_note(tmp_path: Path) -> None:
    noisy = {**SDXL, "offset_noise": True}
    for options, stated in ((noisy, True), ({**noisy, "train_batch_size": 1}, False), (SDXL, False)):
        notes = resolve(tmp_path, {"train_batch_size": 4, **options}, datasets=IMAGES).notes
        assert any("noise_offset_probability" in one for one in notes) is stated
