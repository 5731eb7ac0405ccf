"""Recorded steps on a real GPU: the same numbers, for shapes that take turns, again after memory was given back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gracetune.config.environment import Environment
from gracetune.hardware import probe
from gracetune.train import replay
from gracetune.train.bench.job import PRESETS, StepJob, config_of
from gracetune.train.bench.random_model import make_model
from gracetune.train.bench.trainer import Trainer, decide, trainer
from gracetune.train.runtime import Runtime, open_runtime

pytestmark = pytest.mark.gpu
STEPS = 8


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with open_runtime("bf16", Environment({})) as opened:
        yield opened


def trained(
    bench: str, waits: bool, folder: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], dict[str, Tensor], int]:  # fmt: skip
    """Losses and weights of a run whose GPU is said to wait, or not; and how often it was recorded."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    recorded = 0
    record = replay.record

    def counted(*given: Any) -> replay.Recording:
        nonlocal recorded
        recorded += 1
        return record(*given)

    with monkeypatch.context() as patch:
        patch.setattr(replay.Replay.__init__, "__kwdefaults__", {
            "say": print, "waits": lambda: waits, "record": counted,
        })  # fmt: skip
        job = replace(StepJob(bench, checkpointing="off"), width=256, height=256)
        model = make_model(PRESETS[bench], folder / f"{bench}-{waits}", "small")
        config = config_of(job, model.source.folder, folder / "out")
        decided = decide(job, config, probe(), model, runtime.device)
        with trainer(job, config, decided, probe(), model, runtime) as run:
            losses = [run.step().clone() for _ in range(STEPS)]
            released(run)
            losses += [run.step().clone() for _ in range(2)]
            weights = {name: one.detach().clone() for name, one in run.trainee.parameters().items()}
    return losses, weights, recorded


def released(run: Trainer) -> None:
    run._job.step.release()


@pytest.mark.parametrize("bench", ["wan14b", "sdxl", "flux", "qwen"])
def test_a_recorded_run_is_the_same_run(
    bench: str, tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, kept, none = trained(bench, False, tmp_path, runtime, monkeypatch)
    found, weights, recorded = trained(bench, True, tmp_path, runtime, monkeypatch)
    assert (none, recorded) == (0, 2), "once, and once more after its memory was given back"
    assert [float(one) for one in found] == [float(one) for one in plain]
    assert all(torch.equal(weights[name], one) for name, one in kept.items())
