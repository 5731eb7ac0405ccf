from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.config.dialects.aitoolkit.optimizer import OPTIMIZERS, OTHER_OPTIMIZERS
from unit.config.aitoolkit_jobs import note, only_problem, problems, read


def optimizer(folder: Path, name: str, params: dict[str, Any] | None = None, **train: Any) -> Any:
    return read(folder, train={"optimizer": name, "optimizer_params": params or {}, **train}).config.optimizer


@pytest.mark.parametrize(
    ("name", "ours", "weight_decay", "eps"),
    [
        ("adamw", "adamw", 0.01, 1e-6),
        ("AdamW8bit", "adamw_8bit", 0.01, 1e-6),
        ("adam", "adamw", 0.0, 1e-6),
        ("adam8bit", "adamw_8bit", 0.0, 1e-6),
        ("adafactor", "adafactor", 0.0, None),
        ("lion", "lion", 0.0, None),
        ("prodigyopt", "prodigy", 0.0, 1e-6),
        ("automagic", "automagic", 0.0, None),
    ],
)
def test_names_and_hidden_defaults(
    tmp_path: Path, name: str, ours: str, weight_decay: float, eps: float | None
) -> None:
    found = optimizer(tmp_path, name)
    assert (found.name, found.weight_decay, found.eps) == (ours, weight_decay, eps)


def test_an_optimizer_that_ai_toolkit_does_not_have(tmp_path: Path) -> None:
    """Those of installed packages are read in the same way."""
    train = {"optimizer": "torch_adafactor", "lr": "1e-3", "optimizer_params": {"weight_decay": "1e-4", "d": 2.0}}
    resolved = read(tmp_path, train=train)
    found = resolved.config.optimizer
    assert (found.name, found.lr, found.weight_decay, found.options) == ("torch_adafactor", 1e-3, 1e-4, {"d": 2.0})
    assert "not an optimizer of ai-toolkit" in note(resolved, "torch_adafactor")
    assert read(tmp_path, train={"optimizer": "torch_adafactor", "lr": None}).config.optimizer.lr == 1e-6


def test_options_go_where_they_belong(tmp_path: Path) -> None:
    params = {"weight_decay": "1e-4", "betas": [0.9, 0.95], "eps": 1e-8, "amsgrad": True}
    found = optimizer(tmp_path, "adamw", params)
    assert (found.weight_decay, found.betas, found.eps) == (1e-4, (0.9, 0.95), 1e-8)
    assert found.options == {"amsgrad": True}


def test_adafactor_does_not_choose_its_own_rate(tmp_path: Path) -> None:
    fixed = {"relative_step": False, "scale_parameter": False, "warmup_init": False}
    assert optimizer(tmp_path, "adafactor").options == fixed
    assert optimizer(tmp_path, "adafactor", {"scale_parameter": True}).options == {**fixed, "scale_parameter": True}


def test_automagic_has_limits_for_all_and_for_each_expert(tmp_path: Path) -> None:
    params = {
        "lr_bump": 1e-6, "min_lr": 1e-7, "max_lr": 1e-3, "high_noise_lr_bump": 2e-6, "high_noise_max_lr": 2e-3,
        "low_noise_min_lr": 5e-8, "low_noise_max_lr": 5e-4, "beta2": 0.99, "clip_threshold": 2.0,
        "eps": [1e-30, 1e-3],
    }  # fmt: skip
    found = optimizer(tmp_path, "automagic", params, lr=1e-6)
    assert (found.limits.lr_bump, found.limits.min_lr, found.limits.max_lr) == (1e-6, 1e-7, 1e-3)
    assert (found.high_noise.lr_bump, found.high_noise.min_lr, found.high_noise.max_lr) == (2e-6, None, 2e-3)
    assert (found.low_noise.lr_bump, found.low_noise.min_lr, found.low_noise.max_lr) == (None, 5e-8, 5e-4)
    assert found.options == {"beta2": 0.99, "clip_threshold": 2.0, "eps": [1e-30, 1e-3]}


def test_limits_belong_to_automagic(tmp_path: Path) -> None:
    params = {"high_noise_lr_bump": 1e-6, "max_lr": 1e-3}
    found = problems(tmp_path, train={"optimizer": "adamw", "optimizer_params": params})
    assert set(found) == {"train.optimizer_params.high_noise_lr_bump", "train.optimizer_params.max_lr"}
    assert "automagic" in found["train.optimizer_params.max_lr"].hint


def test_a_limit_below_its_floor_is_a_problem(tmp_path: Path) -> None:
    params = {"low_noise_min_lr": 1e-3, "low_noise_max_lr": 1e-4}
    found = problems(tmp_path, train={"optimizer": "automagic", "optimizer_params": params, "lr": 1e-6})
    assert set(found) == {"train.optimizer_params.low_noise_min_lr"}


def test_misspelt_options_are_corrected(tmp_path: Path) -> None:
    params = {"high_noise_lr_bmp": 1e-6}
    problem = only_problem(tmp_path, train={"optimizer": "automagic", "optimizer_params": params, "lr": 1e-6})
    assert problem.hint == "write `high_noise_lr_bump`"


def test_prodigy_and_automagic_move_a_rate_that_makes_no_sense(tmp_path: Path) -> None:
    low = read(tmp_path, train={"optimizer": "prodigy", "lr": 1e-4})
    assert low.config.optimizer.lr == 1.0
    assert "1.0" in note(low, "Prodigy")
    assert optimizer(tmp_path, "prodigy", lr=0.5).lr == 0.5
    high = read(tmp_path, train={"optimizer": "automagic", "lr": 1.0})
    assert high.config.optimizer.lr == 1e-6
    assert "1e-06" in note(high, "too high a start for Automagic")
    assert "--set optimizer.options.rates=upstream" in note(high, "gracetune stores Automagic's learning rates exactly")


@pytest.mark.parametrize("name", OTHER_OPTIMIZERS)
def test_optimizers_we_lack_are_rejected_with_their_options(tmp_path: Path, name: str) -> None:
    problem = only_problem(tmp_path, train={"optimizer": name, "optimizer_params": {"whatever": 1}})
    assert problem.key == "config.process[0].train.optimizer"
    assert "--allow-unsupported" in problem.hint


def test_a_misspelt_optimizer_is_corrected(tmp_path: Path) -> None:
    assert only_problem(tmp_path, train={"optimizer": "adamw8bits"}).hint == "write `optimizer: adamw8bit`"
    assert not set(OPTIMIZERS) & set(OTHER_OPTIMIZERS)


def test_coupled_decay_is_rejected(tmp_path: Path) -> None:
    problem = only_problem(tmp_path, train={"optimizer": "adam", "optimizer_params": {"weight_decay": 0.1}})
    assert problem.hint == "write `optimizer: adamw`"


def test_swapping_parameters_is_rejected(tmp_path: Path) -> None:
    params = {"do_paramiter_swapping": True, "paramiter_swapping_factor": 0.5}
    problem = only_problem(tmp_path, train={"optimizer": "adafactor", "optimizer_params": params})
    assert problem.key.endswith("optimizer_params.do_paramiter_swapping")


def schedule(folder: Path, name: str | None, params: dict[str, Any] | None = None) -> Any:
    return read(folder, train={"lr_scheduler": name, "lr_scheduler_params": params, "lr": 1e-4}).config.schedule


@pytest.mark.parametrize(
    ("name", "params", "ours"),
    [
        (None, None, ("constant", 0, 0.0)),
        ("constant", {"factor": 1.0}, ("constant", 0, 0.0)),
        ("constant_with_warmup", {"num_warmup_steps": 50}, ("constant_with_warmup", 50, 0.0)),
        ("constant_with_warmup", None, ("constant_with_warmup", 1000, 0.0)),
        ("cosine", {"eta_min": 1e-6, "T_max": 7}, ("cosine", 0, 1e-6)),
        ("cosine_with_restarts", {"T_mult": 2}, ("cosine_with_restarts", 0, 0.0)),
        ("cosine_with_restarts", {"warmup_steps": 100}, ("cosine_with_restarts", 100, 0.0)),
        ("cosine_with_warmup", {"num_warmup_steps": 5}, ("cosine", 5, 0.0)),
        ("linear", {"start_factor": 1.0, "end_factor": 0.1}, ("linear", 0, pytest.approx(1e-5))),
    ],
)
def test_schedules(tmp_path: Path, name: str | None, params: dict[str, Any] | None, ours: tuple[Any, ...]) -> None:
    found = schedule(tmp_path, name, params)
    assert (found.name, found.warmup_steps, found.end_lr) == ours


@pytest.mark.parametrize(
    ("name", "params", "key"),
    [
        ("linear", None, "lr_scheduler"),
        ("linear", {"end_factor": 0.0}, "lr_scheduler"),
        ("step", None, "lr_scheduler"),
        ("cosin", None, "lr_scheduler"),
        ("constant", {"factor": 0.5}, "lr_scheduler_params.factor"),
        ("constant", {"gamma": 0.5}, "lr_scheduler_params.gamma"),
        ("cosine", {"eta_mn": 0.5}, "lr_scheduler_params.eta_mn"),
    ],
)
def test_schedules_we_lack_are_named(tmp_path: Path, name: str, params: dict[str, Any] | None, key: str) -> None:
    problem = only_problem(tmp_path, train={"lr_scheduler": name, "lr_scheduler_params": params})
    assert problem.key == f"config.process[0].train.{key}"


def test_upstreams_linear_climbs_and_the_rejection_says_so(tmp_path: Path) -> None:
    problem = only_problem(tmp_path, train={"lr_scheduler": "linear"})
    assert "climbs from a third" in problem.expected
    assert "end_factor: 0.0" in problem.hint
