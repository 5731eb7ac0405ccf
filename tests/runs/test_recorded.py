"""Complete runs with captured and replayed steps, on a CPU. A replay runs the captured function again, and
everything around it is real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.models.spec import ExpertName
from gracetune.train.cuda_graphs import Replay
from gracetune.train.gradients import FlatGradients
from gracetune.train.trained_model import TrainedModel
from gracetune.train.view import CollectingView
from runs.made_runs import TinyModel, config_for, run
from runs.test_resume import STEPS, assert_same_end, losses
from runs.test_validation import held_out
from unit.train.test_cuda_graphs import Device

SECTIONS: dict[str, Any] = {
    "adapter": {"kind": "lokr", "rank": 4},
    "optimizer": {"name": "automagic", "lr": 1e-4},
    "training": {
        "max_steps": STEPS,
        "batch_size": 1,
        "gradient_accumulation_steps": 2,
        "ema": {"enabled": True, "decay": 0.9},
    },
    "model": {"switch_experts_every": 1},
    "validation": {
        "every_steps": 5,
        "loss_every_steps": 7,
        "steps": 2,
        "width": 64,
        "height": 64,
        "num_frames": 1,
        "prompts": [{"prompt": "one"}],
    },
}


def test_recorded_steps_learn_what_others_learn(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two experts, steps of two micro-batches, EMA, and captions of different lengths. Validation and a held-out
    loss in between release the captures."""
    data = held_out(tmp_path)
    for number, image in enumerate(sorted((tmp_path / "pictures").glob("*.txt"))):
        image.write_text("one more word " * (number + 1))
    plain, replayed = (
        config_for("wan", tiny_model, tmp_path / name, datasets=data, **SECTIONS) for name in ("plain", "replayed")
    )
    run(plain)
    device, heard = Device(waits=True, error=None, free=1 << 50, synchronizes=False), CollectingView()

    def replay(config: Any, trained_model: TrainedModel, gradients: dict[ExpertName, FlatGradients], *_: Any) -> Replay:
        flat = {trained_model.host.module(name): one for name, one in gradients.items()}
        return Replay(trained_model.spec, flat, report=heard.report, gpu=device)

    monkeypatch.setattr("gracetune.train.assembly._replay", replay)
    run(replayed, heard)
    assert losses(replayed) == losses(plain)
    assert_same_end(replayed, plain)
    assert (device.recorded, device.pools) == (5, 3), "each expert's, before and after samples; one after the loss"
    assert sum(line.startswith("CUDA graph: on") for line in heard.lines) == 1
