from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.config.dialects.aitoolkit.objective import timestep_of
from gracetune.config.run_config import PushToHub
from unit.config.aitoolkit_jobs import FLUX, SDXL, dataset, job, note, only_problem, problems, read

DDPM = {"noise_scheduler": "ddpm"}


def train(folder: Path, keys: dict[str, Any], **sections: Any) -> Any:
    return read(folder, train=keys, **sections).config


def test_upstream_defaults_fill_an_empty_block(tmp_path: Path) -> None:
    document = job()
    document["config"]["process"][0]["train"] = {"noise_scheduler": "flowmatch"}
    resolved = read(tmp_path, document)
    config = resolved.config
    assert (config.training.max_steps, config.training.batch_size, config.optimizer.lr) == (1000, 1, 1e-6)
    assert (config.optimizer.name, config.optimizer.eps, config.optimizer.weight_decay) == ("adamw", 1e-6, 0.01)
    assert (config.objective.timesteps, config.objective.flow_shift) == ("sigmoid", 1.0)
    assert (config.training.mixed_precision, config.model.base_precision) == ("fp32", "fp32")
    assert config.validation.at_start is True
    assert "bf16" in note(resolved, "train.dtype")


@pytest.mark.parametrize(
    ("keys", "arithmetic", "weights"),
    [
        ({"dtype": "bfloat16"}, "bf16", "bf16"),
        ({"dtype": "float16"}, "fp16", "fp16"),
        ({"dtype": "float32"}, "fp32", "fp32"),
        ({"dtype": None, "mixed_precision": "fp16"}, "fp16", "fp16"),
        ({"dtype": "bf16", "mixed_precision": "fp16"}, "fp16", "bf16"),
    ],
)
def test_precisions(tmp_path: Path, keys: dict[str, Any], arithmetic: str, weights: str) -> None:
    config = train(tmp_path, keys)
    assert (config.training.mixed_precision, config.model.base_precision) == (arithmetic, weights)


def test_accumulation_in_the_newer_key_counts_optimizer_steps(tmp_path: Path) -> None:
    config = train(tmp_path, {"gradient_accumulation": 4, "steps": 100})
    assert (config.training.gradient_accumulation_steps, config.training.max_steps) == (4, 100)
    assert config.training.accumulation == "sum"


def test_accumulation_in_the_older_key_counts_micro_batches(tmp_path: Path) -> None:
    resolved = read(
        tmp_path,
        train={"gradient_accumulation_steps": 4, "steps": 101, "switch_boundary_every": 10,
               "lr_scheduler": "constant_with_warmup", "lr_scheduler_params": {"num_warmup_steps": 8}},
        save={"save_every": 40},
        sample={"sample_every": 20},
        logging={"log_every": 1},
    )  # fmt: skip
    config = resolved.config
    assert (config.training.gradient_accumulation_steps, config.training.max_steps) == (4, 26)
    assert (config.checkpoints.every_steps, config.validation.every_steps, config.logging.every_steps) == (10, 5, 1)
    assert (config.model.switch_experts_every, config.schedule.warmup_steps) == (3, 2)
    assert "micro-batch" in note(resolved, "gradient_accumulation_steps")


def test_one_of_both_accumulation_keys_may_be_one(tmp_path: Path) -> None:
    config = train(tmp_path, {"gradient_accumulation": 2, "gradient_accumulation_steps": 1})
    assert config.training.gradient_accumulation_steps == 2
    found = problems(tmp_path, train={"gradient_accumulation": 2, "gradient_accumulation_steps": 3})
    assert set(found) == {"train.gradient_accumulation_steps"}
    found = problems(tmp_path, train={"gradient_accumulation_steps": -1})
    assert set(found) == {"train.gradient_accumulation_steps"}


@pytest.mark.parametrize(
    ("kind", "ours", "shift", "weights"),
    [
        ("sigmoid", "sigmoid", 1.0, None),
        ("linear", "uniform", 1.0, None),
        ("weighted", "uniform", 1.0, "measured"),
        ("one_step", "one_step", 1.0, None),
        ("shift", "shift", 5.0, None),
        ("lumina2_shift", "shift", 5.0, None),
    ],
)
def test_timesteps_and_the_shift_only_one_of_them_has(
    tmp_path: Path, kind: str, ours: str, shift: float, weights: str | None
) -> None:
    objective = train(tmp_path, {"timestep_type": kind}).objective
    assert (objective.timesteps, objective.flow_shift, objective.timestep_weights) == (ours, shift, weights)


@pytest.mark.parametrize(
    ("keys", "timesteps", "weights"),
    [
        ({"linear_timesteps": True}, "uniform", "bell"),
        ({"linear_timesteps2": True, "timestep_type": "sigmoid"}, "uniform", "half_bell"),
        ({"linear_timesteps": True, "timestep_type": "weighted"}, "uniform", "measured"),
        ({"linear_timesteps": False}, "sigmoid", None),
    ],
)
def test_switches_for_weighted_uniform_timesteps(
    tmp_path: Path, keys: dict[str, Any], timesteps: str, weights: str | None
) -> None:
    objective = train(tmp_path, keys).objective
    assert (objective.timesteps, objective.timestep_weights, objective.flow_shift) == (timesteps, weights, 1.0)
    resolved = read(tmp_path, train={**keys, **DDPM}, model=SDXL)
    assert resolved.config.objective.timestep_weights is None


def test_a_shift_is_the_archs_own(tmp_path: Path) -> None:
    flux = train(tmp_path, {"timestep_type": "shift"}, model=FLUX).objective
    assert (flux.flow_shift, flux.shift_terminal) == ("resolution", 0.0)
    assert flux.resolution_shift is not None
    assert (flux.resolution_shift.max_image_seq_len, flux.resolution_shift.max_shift) == (4096, 1.15)
    model = {"name_or_path": "Qwen/Qwen-Image", "arch": "qwen_image"}
    qwen = train(tmp_path, {"timestep_type": "shift"}, model=model).objective
    assert qwen.resolution_shift is not None
    assert (qwen.resolution_shift.max_image_seq_len, qwen.shift_terminal) == (8192, 0.02)


def test_cfg_scale_is_what_a_guidance_input_is_given(tmp_path: Path) -> None:
    assert train(tmp_path, {"cfg_scale": 3.5}, model=FLUX).objective.guidance == 3.5
    assert train(tmp_path, {}, model=FLUX).objective.guidance is None
    schnell = {"name_or_path": "black-forest-labs/FLUX.1-schnell", "arch": "flux"}
    for model in (None, SDXL, schnell):
        given = {} if model is None else {"model": model}
        resolved = read(tmp_path, train={"cfg_scale": 3.5, **(DDPM if model is SDXL else {})}, **given)
        assert resolved.config.objective.guidance is None
        assert "cfg_scale" in note(resolved, "harmless")


def test_adafactor_is_not_clipped(tmp_path: Path) -> None:
    assert train(tmp_path, {"optimizer": "adafactor"}).training.max_grad_norm is None
    resolved = read(tmp_path, train={"optimizer": "adafactor", "max_grad_norm": 0.5})
    assert resolved.config.training.max_grad_norm is None
    assert "not used with adafactor" in note(resolved, "max_grad_norm")
    assert train(tmp_path, {"max_grad_norm": 0.5}).training.max_grad_norm == 0.5


def test_the_boundary_of_image_to_video_experts_is_named(tmp_path: Path) -> None:
    model = {"name_or_path": "Wan-AI/Wan2.2-I2V-A14B-Diffusers", "arch": "wan22_14b_i2v"}
    resolved = read(tmp_path, model=model)
    assert resolved.config.model.expert_boundary is None
    assert "--set model.expert_boundary=0.875" in note(resolved, "wan22_14b_i2v")


def test_timesteps_we_lack_are_rejected_and_unknown_ones_corrected(tmp_path: Path) -> None:
    assert "left out" not in only_problem(tmp_path, train={"timestep_type": "lognorm_blend"}).hint
    assert only_problem(tmp_path, train={"timestep_type": "sigmod"}).hint == "write `timestep_type: sigmoid`"


@pytest.mark.parametrize("bias", ["balanced", "content", "style"])
def test_bias(tmp_path: Path, bias: str) -> None:
    objective = train(tmp_path, {"content_or_style": bias}).objective
    assert objective.timestep_bias == bias
    assert objective.timestep_bias_over == ("all_levels" if bias == "balanced" else "noise_range")


def test_a_scheduler_is_asked_for_where_there_is_a_choice(tmp_path: Path) -> None:
    assert only_problem(tmp_path, train=DDPM).hint == "write `flowmatch`"
    assert "flow matching" in note(read(tmp_path, train={"noise_scheduler": None}), "noise_scheduler")
    ddpm = train(tmp_path, {**DDPM, "timestep_type": "sigmoid"}, model=SDXL).objective
    assert (ddpm.prediction, ddpm.timesteps) == (None, "uniform")
    flow = train(tmp_path, {"noise_scheduler": "flowmatch"}, model=SDXL).objective
    assert (flow.prediction, flow.timesteps) == ("flow", "sigmoid")
    assert only_problem(tmp_path, train={"noise_scheduler": "lcm"}, model=SDXL).key.endswith("train.noise_scheduler")


@pytest.mark.parametrize(
    ("step", "sigmoid", "timestep"),
    [
        (0, False, 1000), (-5, False, 1000), (999, False, 0), (5000, True, 0), (0, True, 1000),
        (200, False, 800), (800, False, 200),
        # half of all sigmoid timesteps are above 500; 84.1 % lie above 1000 / (1 + e) = 269
        (500, True, 500), (841, True, 269), (159, True, 731),
    ],
)  # fmt: skip
def test_denoising_steps_count_down_from_noise(step: int, sigmoid: bool, timestep: int) -> None:
    assert timestep_of(step, sigmoid) == timestep


def test_denoising_steps_of_a_shift_are_shifted(tmp_path: Path) -> None:
    assert timestep_of(800, False, 5.0) == round(1000 * 5 * 0.2 / (1 + 4 * 0.2))
    model = {"name_or_path": "Wan-AI/Wan2.1-T2V-14B-Diffusers", "arch": "wan21"}
    keys = {"timestep_type": "shift", "min_denoising_steps": 200, "max_denoising_steps": 600}
    objective = train(tmp_path, keys, model=model).objective
    assert (objective.min_timestep, objective.max_timestep) == (667, 923)
    assert set(problems(tmp_path, train=keys, model=FLUX)) == {"train.min_denoising_steps", "train.max_denoising_steps"}


@pytest.mark.parametrize("sigmoid", [False, True])
def test_later_denoising_steps_have_less_noise(sigmoid: bool) -> None:
    levels = [timestep_of(step, sigmoid) for step in range(1000)]
    assert levels == sorted(levels, reverse=True)
    assert set(levels) <= set(range(1001))


@pytest.mark.parametrize(
    ("keys", "noise_range"),
    [
        ({}, (0, 1000)),
        ({"min_denoising_steps": 0, "max_denoising_steps": 999}, (0, 1000)),
        ({"max_denoising_steps": 1000}, (0, 1000)),
        ({"min_denoising_steps": 100, "max_denoising_steps": 300}, (700, 900)),
        ({"max_denoising_steps": 300}, (700, 1000)),
        ({"min_denoising_steps": 100}, (0, 900)),
    ],
)
def test_a_window_of_denoising_steps(tmp_path: Path, keys: dict[str, int], noise_range: tuple[int, int]) -> None:
    objective = train(tmp_path, {"timestep_type": "linear", **keys}, model=FLUX).objective
    assert (objective.min_timestep, objective.max_timestep) == noise_range


def test_the_experts_own_windows_win(tmp_path: Path) -> None:
    resolved = read(tmp_path, train={"timestep_type": "linear", "min_denoising_steps": 100})
    assert resolved.config.objective.max_timestep == 1000
    assert "expert" in note(resolved, "min_denoising_steps")


def test_a_window_of_shifted_timesteps_is_rejected(tmp_path: Path) -> None:
    problem = only_problem(tmp_path, model=FLUX, train={"timestep_type": "shift", "max_denoising_steps": 300})
    assert problem.key.endswith("train.max_denoising_steps")


def test_a_window_must_not_be_empty(tmp_path: Path) -> None:
    keys = {"timestep_type": "linear", "min_denoising_steps": 300, "max_denoising_steps": 300}
    assert "train.max_denoising_steps" in problems(tmp_path, model=FLUX, train=keys)


def test_snr_weights(tmp_path: Path) -> None:
    assert train(tmp_path, {**DDPM, "min_snr_gamma": 5.0}, model=SDXL).objective.snr_gamma == 5.0
    assert "min_snr_gamma" in only_problem(tmp_path, train={**DDPM, "snr_gamma": 5.0}, model=SDXL).hint
    resolved = read(tmp_path, train={"min_snr_gamma": 5.0})
    assert resolved.config.objective.snr_gamma is None
    assert "weighs 1" in note(resolved, "min_snr_gamma")


def test_losses(tmp_path: Path) -> None:
    assert train(tmp_path, {"loss_type": "mae"}).objective.loss == "mae"
    assert only_problem(tmp_path, train={"loss_type": "wavelet"}).key.endswith("train.loss_type")
    assert only_problem(tmp_path, train={"loss_type": "msee"}).hint == "write `loss_type: mse`"


def test_ema(tmp_path: Path) -> None:
    ema = train(tmp_path, {"ema_config": {"use_ema": True, "ema_decay": 0.99}}).training.ema
    assert (ema.enabled, ema.decay) == (True, 0.99)
    assert train(tmp_path, {"ema_config": {"use_ema": True}}).training.ema.decay == 0.999
    assert train(tmp_path, {"ema_config": {"use_ema": False, "ema_decay": 0.99}}).training.ema.enabled is False
    found = problems(tmp_path, train={"ema_config": {"use_ema": True, "use_feedback": True}})
    assert set(found) == {"train.ema_config.use_feedback"}


@pytest.mark.parametrize(("value", "ours"), [(True, "full"), (False, "off"), (None, "auto")])
def test_gradient_checkpointing(tmp_path: Path, value: bool | None, ours: str) -> None:
    assert train(tmp_path, {"gradient_checkpointing": value}).training.gradient_checkpointing == ours


@pytest.mark.parametrize(
    ("backend", "ours"),
    [("native", "auto"), ("flash", "flash_attn_2"), ("_flash_3_hub", "flash_attn_3"), ("_native_cudnn", "cudnn")],
)
def test_attention(tmp_path: Path, backend: str, ours: str) -> None:
    assert train(tmp_path, {"attention_backend": backend}).training.attention == ours


def test_attention_in_eight_bits_is_rejected_and_others_are_harmless(tmp_path: Path) -> None:
    assert "8 bits" in only_problem(tmp_path, train={"attention_backend": "sage"}).expected
    assert "attention_backend" in note(read(tmp_path, train={"attention_backend": "flex"}), "harmless")


def test_only_flux_has_a_guidance_embedding_to_bypass(tmp_path: Path) -> None:
    keys = {"bypass_guidance_embedding": True}
    assert only_problem(tmp_path, model=FLUX, train=keys).key.endswith("train.bypass_guidance_embedding")
    assert "bypass_guidance_embedding" in note(read(tmp_path, train=keys), "harmless")


def test_experts_take_turns(tmp_path: Path) -> None:
    assert train(tmp_path, {"switch_boundary_every": 10}).model.switch_experts_every == 10
    resolved = read(tmp_path, model=FLUX, train={"switch_boundary_every": 10})
    assert resolved.config.model.switch_experts_every == 1
    assert "switch_boundary_every" in note(resolved, "harmless")


def test_sampling_switches(tmp_path: Path) -> None:
    assert train(tmp_path, {"skip_first_sample": True}).validation.at_start is False
    assert train(tmp_path, {"disable_sampling": True}).validation.enabled is False


def test_an_unloaded_text_encoder_trains_on_one_prompt(tmp_path: Path) -> None:
    resolved = read(
        tmp_path,
        trigger_word="p3rson",
        train={"unload_text_encoder": True},
        datasets=[*dataset(), *dataset(is_reg=True), *dataset(trigger_word="d0g", default_caption="a dog")],
    )
    captions = [found.captions for found in resolved.config.datasets]
    assert [found.strategy for found in captions] == ["instanceprompt"] * 3
    assert [found.instance_prompt for found in captions] == ["p3rson", "", "d0g"]
    assert "every caption is replaced" in note(resolved, "unload_text_encoder")


def test_cached_captions_make_unloading_harmless(tmp_path: Path) -> None:
    resolved = read(tmp_path, train={"unload_text_encoder": True, "cache_text_embeddings": True})
    assert resolved.config.datasets[0].captions.strategy == "textfile"
    assert resolved.origins["cache", "text_cache_type"].key == "config.process[0].train.cache_text_embeddings"
    assert "no effect" in note(resolved, "unload_text_encoder")


@pytest.mark.parametrize(
    ("name", "on", "off"),
    [
        ("train_text_encoder", True, False),
        ("train_unet", False, True),
        ("diff_output_preservation", True, False),
        ("blank_prompt_preservation", True, False),
        ("do_guidance_loss", True, False),
        ("do_differential_guidance", True, False),
        ("noise_multiplier", 1.1, 1.0),
        ("prompt_dropout_prob", 0.1, 0.0),
        ("loss_target", "source", "noise"),
        ("start_step", 100, None),
        ("max_loss", 1.0, None),
        ("optimal_noise_pairing_samples", 4, 1),
        ("num_train_timesteps", 500, 1000),
        ("validation_config", {"validation_items": []}, None),
    ],
)
def test_what_changes_the_result_is_rejected_unless_off(tmp_path: Path, name: str, on: Any, off: Any) -> None:
    assert only_problem(tmp_path, train={name: on}).key == f"config.process[0].train.{name}"
    assert read(tmp_path, train={name: off}).config == read(tmp_path).config


def test_saving_and_logging(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        save={"dtype": "bfloat16", "save_every": 250, "max_step_saves_to_keep": 3, "save_format": "safetensors"},
        logging={"log_every": 5, "use_wandb": True, "project_name": "cats", "use_ui_logger": True},
    ).config
    saved = config.checkpoints
    assert (saved.save_dtype, saved.every_steps, saved.keep_last, saved.format) == ("bf16", 250, 3, "comfyui")
    assert (config.logging.every_steps, config.logging.project) == (5, "cats")
    assert config.logging.trackers == ("tensorboard", "wandb")
    assert read(tmp_path, save={"save_every": 0}).config.checkpoints.every_steps is None
    assert only_problem(tmp_path, save={"save_format": "pickle"}).key.endswith("save.save_format")


def test_uploads(tmp_path: Path) -> None:
    requested = read(tmp_path, save={"push_to_hub": True, "hf_repo_id": "owner/name"}).config.checkpoints.push_to_hub
    assert requested == PushToHub(repo_id="owner/name", private=False)
    hidden = read(tmp_path, save={"push_to_hub": True, "hf_repo_id": "a/b", "hf_private": True})
    assert hidden.config.checkpoints.push_to_hub == PushToHub(repo_id="a/b", private=True)
    assert read(tmp_path, save={"hf_repo_id": "a/b"}).config.checkpoints.push_to_hub is None
    assert only_problem(tmp_path, save={"push_to_hub": True}).key.endswith("save.hf_repo_id")


def test_min_snr_gamma_of_a_v_model_is_a_note(tmp_path: Path) -> None:
    train = {**DDPM, "min_snr_gamma": 5}
    assert "v-prediction" in note(read(tmp_path, model={**SDXL, "is_v_pred": True}, train=train), "min_snr_gamma")
    assert not [one for one in read(tmp_path, model=SDXL, train=train).notes if "min_snr_gamma" in one]
