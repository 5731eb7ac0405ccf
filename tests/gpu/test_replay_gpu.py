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
from gracetune.train.bench.trainer import decide, trainer
from gracetune.train.replay import Gpu, Recording
from gracetune.train.runtime import Runtime, open_runtime

pytestmark = pytest.mark.gpu
STEPS = 8


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with open_runtime("bf16", Environment({})) as opened:
        yield opened


def trained(
    bench: str, waits: bool, folder: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[float], Tensor, int]:  # fmt: skip
    """Losses of a run whose GPU is said to wait, or not, how far its weights moved, and how often it was recorded."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    recorded = 0

    class Watched(Gpu):
        def waits(self) -> bool:
            return waits

        def record(self, *given: Any) -> Recording:
            nonlocal recorded
            recorded += 1
            return super().record(*given)

    with monkeypatch.context() as patch:
        patch.setattr(replay, "Gpu", Watched)
        job = replace(StepJob(bench, checkpointing="off"), width=256, height=256)
        model = make_model(PRESETS[bench], folder / f"{bench}-{waits}", "small")
        config = config_of(job, model.source.folder, folder / "out")
        decided = decide(job, config, probe(), model, runtime.device)
        with trainer(job, config, decided, probe(), model, runtime) as run:
            first = {name: one.detach().clone() for name, one in run.trainee.parameters().items()}
            losses = [float(run.step()) for _ in range(STEPS)]
            run.job.step.release()
            losses += [float(run.step()) for _ in range(2)]
            moved = {name: one.detach() - first[name] for name, one in run.trainee.parameters().items()}
    return losses, torch.cat([moved[name].flatten() for name in sorted(moved)]), recorded


@pytest.mark.parametrize("bench", ["wan14b", "sdxl", "flux", "qwen"])
def test_a_recorded_run_is_the_same_run(
    bench: str, tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, moved, none = trained(bench, False, tmp_path, runtime, monkeypatch)
    found, also_moved, recorded = trained(bench, True, tmp_path, runtime, monkeypatch)
    assert (none, recorded) == (0, 2), "once, and once more after its memory was given back"
    # Two runs launched kernel by kernel differ as much: attention's backward pass adds up in no fixed order.
    assert found == pytest.approx(plain, rel=1e-4)
    assert float((also_moved - moved).norm() / moved.norm()) < 0.05
