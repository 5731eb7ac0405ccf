"""Between log steps the host never synchronizes with the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gracetune.train.loop
from gracetune.testing.family_check.graph_safety import HostReads
from gracetune.train.guards import _Norm
from runs.made_runs import TinyModel, config_for, run


@pytest.mark.parametrize(
    ("family", "optimizer"),
    [
        ("wan", "automagic"),
        *(
            pytest.param(family, optimizer, marks=pytest.mark.full)
            for family, optimizer in (
                ("wan", "lion"), ("flux", "adamw"), ("sdxl", "adamw"), ("qwen_image", "adamw"),
                ("stable_audio", "adamw"),
            )
        ),
    ],
)  # fmt: skip
def test_no_number_is_read_in_a_window(
    family: str, optimizer: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With EMA, accumulation and clipping, in fp32 and with a loss scale (fp16)."""
    reading, original = HostReads(), gracetune.train.loop.run_step

    def watched(job: Any) -> Any:
        # What is made once, with the first step, may be looked at.
        if job.position.step == 0:
            return original(job)
        with reading:
            return original(job)

    monkeypatch.setattr(gracetune.train.loop, "run_step", watched)
    monkeypatch.setattr(_Norm, "is_ready", False)  # as from a GPU: the norm has not arrived
    training = {
        "max_steps": 4, "gradient_accumulation_steps": 2, "batch_size": 2,
        "ema": {"enabled": True}, "mixed_precision": "fp16" if family == "flux" else "fp32",
    }  # fmt: skip
    config = config_for(
        family, tiny_model, tmp_path, training=training, optimizer={"name": optimizer}, logging={"every_steps": 100}
    )
    run(config)
    assert reading.lines == []


def test_a_read_would_be_seen() -> None:
    reads: list[Callable[[torch.Tensor], object]] = [torch.Tensor.item, bool, float, int]
    for read in reads:
        reading = HostReads()
        with reading:
            read(torch.ones(1))
        assert reading.lines, read
