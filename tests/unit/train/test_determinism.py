from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.config.rules import broken_rules
from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError, GracetuneError
from gracetune.train.determinism import deterministic
from gracetune.train.view import CollectingView
from runs.made_runs import TinyModel, config_for, run
from runs.test_resume import losses

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS, "")  # so that it is taken back whatever a test does
    monkeypatch.delenv(CUBLAS)


def requested(**training: Any) -> RunConfig:
    values = {
        "name": "n", "output_dir": "o", "model": {"family": "sdxl"}, "datasets": [{"id": "d", "path": "p"}],
        "training": {"max_steps": 1, **training},
    }  # fmt: skip
    return RunConfig.model_validate(values)


def test_torch_and_cublas_are_deterministic_inside_and_torch_is_restored() -> None:
    view = CollectingView()
    with deterministic(requested(deterministic=True), view):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert ":4096:8" in view.lines[0]
    with deterministic(requested(), CollectingView()):
        assert not torch.are_deterministic_algorithms_enabled()


def test_a_workspace_with_which_cublas_is_not_deterministic_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS, ":0:0")
    with (
        pytest.raises(ConfigError, match=r":0:0.*\n?.*:4096:8"),
        deterministic(requested(deterministic=True), CollectingView()),
    ):
        pass
    monkeypatch.setenv(CUBLAS, ":16:8")
    view = CollectingView()
    with deterministic(requested(deterministic=True), view):
        pass
    assert ":16:8" in view.lines[0]


def test_an_operation_without_a_deterministic_kernel_is_a_typed_error() -> None:
    message = pytest.raises(GracetuneError, match=r"--set training\.deterministic=false")
    with message, deterministic(requested(deterministic=True), CollectingView()):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
    assert not torch.are_deterministic_algorithms_enabled()
    with (
        pytest.raises(RuntimeError, match="something else"),
        deterministic(requested(deterministic=True), CollectingView()),
    ):
        raise RuntimeError("something else")


def test_a_package_without_deterministic_kernels_is_rejected() -> None:
    assert [one.path for one in broken_rules(requested(deterministic=True, attention="flash_attn_3"))] == [
        ("training", "attention")
    ]
    assert not broken_rules(requested(deterministic=True))


@pytest.mark.full
def test_a_deterministic_run_learns_what_any_run_on_a_cpu_learns(tiny_model: TinyModel, tmp_path: Path) -> None:
    plain = config_for("flux", tiny_model, tmp_path / "plain", training={"max_steps": 2})
    run(plain)
    message = config_for("flux", tiny_model, tmp_path / "told", training={"max_steps": 2, "deterministic": True})
    view = CollectingView()
    run(message, view)
    assert view.lines[0].startswith("deterministic")
    assert losses(message) == losses(plain)
