from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.config.run_config import RunConfig
from runs.launched import launch, write_config
from runs.made import Heard, TinyModel, config_for, pictures, run
from runs.test_resume import losses, states

STEPS = 3
SECTIONS: dict[str, Any] = {"training": {"max_steps": STEPS, "batch_size": 2, "gradient_accumulation_steps": 2}}
FULL = {"adapter": {"kind": "full_finetune"}, "optimizer": {"lr": 1e-5}}
LOKR: dict[str, Any] = {
    "adapter": {"kind": "lokr", "rank": 4},
    "optimizer": {"name": "automagic"},
    "training": {**SECTIONS["training"], "ema": {"enabled": True, "decay": 0.9}},
    "validation": {"at_start": True, "steps": 2, "width": 64, "height": 64, "prompts": [{"prompt": "a"}]},
}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
Run = tuple[RunConfig, dict[str, str], int | None]


def half(config: RunConfig, folder: Path) -> RunConfig:
    """The same windows, shared out over two processes."""
    training = config.training.model_copy(update={"batch_size": 1})
    return config.model_copy(update={"training": training, "output_dir": str(folder)})


def run_two(runs: list[Run], folder: Path) -> str:
    """Two processes go through all of them; what the first one said."""
    jobs = [
        (str(write_config(config, folder / f"{number}.yaml")), variables, stop_after)
        for number, (config, variables, stop_after) in enumerate(runs)
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    ended = launch(folder / "jobs.json", 2)
    for code, _, errors in ended:
        assert code == 0, errors
    return ended[0][1]


def assert_close(ours: RunConfig, theirs: RunConfig, step: int = STEPS) -> None:
    for mine, other in zip(losses(ours), losses(theirs), strict=True):
        assert mine[:2] == other[:2]
        assert mine[2:] == pytest.approx(other[2:], rel=2e-5)
    one, two = states(ours, step)["parameters.safetensors"], states(theirs, step)["parameters.safetensors"]
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-6)


def test_two_processes_learn_what_one_learns(tiny_model: TinyModel, tmp_path: Path) -> None:
    """As replicas, and with the model shared out (FSDP2); sharded and interrupted, it goes on where it was."""
    alone = config_for("wan", tiny_model, tmp_path, **SECTIONS)
    run(alone)
    replicas, sharded, parted = (half(alone, tmp_path / name) for name in ("replicas", "sharded", "parted"))
    said = run_two([(replicas, {}, None), (sharded, FSDP, None), (parted, FSDP, 2), (parted, FSDP, None)], tmp_path)
    assert said.count("spread over 2 processes") == 3
    for config in (replicas, sharded, parted):
        assert_close(config, alone)
    assert losses(parted) == losses(sharded)


@pytest.mark.full
def test_a_file_that_turns_out_to_be_damaged_is_left_out_by_both(tiny_model: TinyModel, tmp_path: Path) -> None:
    """It is decoded by one of them in the middle of an epoch; the windows stay those of one process."""
    folder = pictures(tmp_path / "data", 6)
    whole = (folder / "03.png").read_bytes()
    (folder / "03.png").write_bytes(whole[:200] + bytes(100) + whole[300:])  # its header is sound
    data = {"id": "live", "path": str(folder), "resolution": 64.0, "cache_latents": "none", "corrupt_threshold": 0.5}
    training = {"max_steps": 4, "batch_size": 2}
    alone = config_for("flux", tiny_model, tmp_path, datasets=[data], training=training)
    view = Heard()
    run(alone, view)
    assert [text for text in view.warnings if "03.png" in text]
    shared = half(alone, tmp_path / "shared")
    said = run_two([(shared, {}, None)], tmp_path)
    assert "left out, unreadable: 03.png of live" in said
    assert_close(shared, alone, 4)


@pytest.mark.full
@pytest.mark.parametrize("sections", [pytest.param(FULL, id="full-finetune"), pytest.param(LOKR, id="lokr-automagic")])
def test_sharded_runs_of_other_kinds_learn_what_one_process_learns(
    sections: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    alone = config_for("wan", tiny_model, tmp_path, **{**SECTIONS, **sections})
    run(alone)
    sharded, parted = half(alone, tmp_path / "sharded"), half(alone, tmp_path / "parted")
    run_two([(sharded, FSDP, None), (parted, FSDP, 1), (parted, FSDP, None)], tmp_path)
    assert_close(sharded, alone)
    assert_close(parted, alone)
    if "validation" in sections:
        ema, ours = (states(config, STEPS)["ema.safetensors"] for config in (alone, parted))
        for name in ema:
            torch.testing.assert_close(ours[name], ema[name], rtol=1e-3, atol=1e-6)
        assert len(list((tmp_path / "sharded" / "samples").glob("*.png"))) == 1
