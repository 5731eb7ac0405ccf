"""Runs that save device memory: parked experts, parked inputs, fp8. On a CPU, with the real parts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.models.activation_parking import ActivationParking, HostClock
from gracetune.models.expert_streaming import StreamedParking
from gracetune.models.experts import ExpertHost
from gracetune.models.parking import InlineLane
from gracetune.models.registry import spec_of
from gracetune.train.planning import choose
from gracetune.train.trained_model import DenoiserChoices
from gracetune.train.view import CollectingView
from runs.made_runs import TinyModel, config_for, run
from runs.test_resume import DUAL_EXPERT, assert_same_end, losses

CPU = torch.device("cpu")


def streaming() -> ExpertHost:
    """The host that `ExpertHost.open` makes for a GPU without room for both experts."""
    blocks = spec_of("wan").repeated_blocks
    return ExpertHost(
        lambda module: StreamedParking(module, blocks, CPU, InlineLane()), "in turn", room=lambda *, on_device,
        elsewhere: 0
    )  # fmt: skip


def test_experts_that_move_in_behind_each_other_learn_what_resident_ones_learn(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (config_for("wan", tiny_model, tmp_path / name, **DUAL_EXPERT) for name in ("resident", "in turn"))
    run(one)
    host = streaming()
    monkeypatch.setattr("gracetune.train.load.open_host", lambda *_: host)
    heard = CollectingView()
    run(two, heard)
    assert losses(two) == losses(one)
    assert_same_end(one, two)
    assert host.switches.followed_bytes > 0
    assert any(
        line.startswith("experts: ") and "copied during the backward pass before" in line for line in heard.lines
    )


@pytest.mark.full
def test_parked_inputs_change_nothing(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    training: dict[str, Any] = {**DUAL_EXPERT["training"], "gradient_checkpointing": "full"}
    sections = {**DUAL_EXPERT, "training": training}
    one, two = (config_for("wan", tiny_model, tmp_path / name, **sections) for name in ("kept", "parked"))
    run(one)
    monkeypatch.setattr("gracetune.train.load.choose", _parking)
    new_home = partial(torch.empty, dtype=torch.uint8)
    parking = ActivationParking(CPU, InlineLane(), HostClock(), new_home, least=64)
    monkeypatch.setattr(ActivationParking, "on", lambda device: parking)
    heard = CollectingView()
    run(two, heard)
    assert losses(two) == losses(one)
    assert_same_end(one, two)
    assert parking.stats.returned > 0
    assert any(line.startswith("blocks' inputs: ") for line in heard.lines)


def _parking(*args: Any, **named: Any) -> tuple[DenoiserChoices, tuple[str, ...]]:
    """The decision of a plan for a GPU that is too small. Everything after that decision is real."""
    choices, lines = choose(*args, **named)
    return replace(choices, park_inputs=True), lines


@pytest.mark.full
@pytest.mark.parametrize("held", ["fp8", "int8"])
def test_a_run_on_8_bit_weights_learns_samples_and_resumes(tiny_model: TinyModel, tmp_path: Path, held: str) -> None:
    sections: dict[str, Any] = {
        "model": {"base_precision": held},
        "training": {"max_steps": 2, "mixed_precision": "bf16"},
        "validation": {"every_steps": 2, "prompts": [{"prompt": "a cat", "width": 64, "height": 64, "num_frames": 1}]},
    }
    heard = CollectingView()
    config = config_for("wan", tiny_model, tmp_path, **sections)
    assert run(config, heard).step == 2
    assert any(line.startswith(f"base weights: {held} for 20 layers") for line in heard.lines)
    assert [*Path(config.output_dir).glob("**/*.png")], "samples"
    further = config.model_copy(update={"training": config.training.model_copy(update={"max_steps": 3})})
    assert run(further).step == 3


def test_a_run_on_int8_weights_learns_what_bf16_learns_nearly(tiny_model: TinyModel, tmp_path: Path) -> None:
    """`auto` is bf16 if that fits: the two runs are equal bit for bit."""
    found: dict[str, list[float]] = {}
    stated: dict[str, list[str]] = {}
    for held in ("bf16", "auto", "int8"):
        heard = CollectingView()
        training = {"max_steps": 2, "mixed_precision": "bf16"}
        config = config_for(
            "flux", tiny_model, tmp_path / held, model={"base_precision": held}, training=training
        )  # fmt: skip
        run(config, heard)
        found[held] = [loss for _, _, loss, _ in losses(config)]
        stated[held] = [line for line in heard.lines if line.startswith("base weights")]
    assert found["auto"] == found["bf16"] != found["int8"]
    assert found["int8"] == pytest.approx(found["bf16"], rel=0.02)
    assert not stated["bf16"]
    assert stated["auto"][0].startswith(
        "base weights bf16: model.base_precision auto, without a plan for these weights"
    )
    assert stated["int8"][0].startswith("base weights: int8 for ")
