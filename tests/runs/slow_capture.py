"""`slow_capture.py CONFIG OUTPUT SECONDS`: a capture whose every step takes so much longer.

The run's clock counts its own work and its own waiting, and stands still while another process has the CPU: what is
compared is the run, however busy the machine is.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from gracetune.baselines.capture import CaptureOptions, capture
from gracetune.config import load
from gracetune.config.environment import Environment
from gracetune.train import callbacks
from gracetune.train.view import View

STEPS = 28


class Waiting(View):
    """Sleep within the step, as a slower kernel would."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds, self._waited = seconds, 0.0

    def on_step(self, step: int, steps: int) -> None:
        time.sleep(self._seconds)
        self._waited += self._seconds

    def clock(self) -> float:
        return time.thread_time() + self._waited


if __name__ == "__main__":
    file, output, seconds = sys.argv[1:]
    alone = Environment({})
    view = Waiting(float(seconds))
    callbacks.TrainingLog = partial(callbacks.TrainingLog, clock=view.clock)  # type: ignore[misc]
    config = load(Path(file), environment=alone).config
    capture(config, CaptureOptions(STEPS, Path(output)), environment=alone, view=view)
