"""The progress line reads the loss from a GPU without waiting for it."""

from __future__ import annotations

import pytest
import torch

from gracetune.telemetry.events import Record, RunStarted
from gracetune.train.job import Pauses
from gracetune.train.live_progress import LiveProgress
from unit.train.test_live_progress import Lines

pytestmark = pytest.mark.gpu


def test_a_loss_is_read_without_synchronizing() -> None:
    lines, loss = Lines(), torch.full((), 0.5, device="cuda")
    live = LiveProgress(lines, dict, Pauses(), lambda: 0.0)
    live.write(Record(0.0, RunStarted(run="r", total_steps=1000)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        live.step_ends(1, "", lambda: loss * 3, logged=False)
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()  # the copy has arrived by the next step
        torch.cuda.set_sync_debug_mode("error")
        live.step_ends(2, "", lambda: loss, logged=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [(one.step, one.loss) for one in lines.refreshed] == [(0, None), (1, 1.5)]
