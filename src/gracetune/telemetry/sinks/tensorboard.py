"""TensorBoard: curves, and the pictures that were drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.events import Record, RunStarted, ValidationDone, Warned, step_of
from gracetune.telemetry.hub import Tracker
from gracetune.telemetry.sinks.scalars import scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """A folder of event files. What a resumed run does again replaces what was drawn before."""

    name = "TensorBoard"

    def __init__(self, folder: Path, run_folder: Path) -> None:
        """`run_folder`: what the paths in events are relative to."""
        try:
            import torch.utils.tensorboard  # noqa: F401 - missing packages are told at the start, not at step 10
        except ImportError as error:
            raise TelemetryError(
                "logging.trackers: tensorboard",
                found=f"it cannot be imported: {error}",
                expected="the package tensorboard",
                hint="pip install tensorboard, or --set logging.trackers=[]",
            ) from None
        self._folder, self._run_folder = folder, run_folder
        self._writer: SummaryWriter | None = None

    def write(self, record: Record) -> None:
        event = record.event
        if isinstance(event, RunStarted):
            self._restart(0 if event.resumed_step is None else event.resumed_step + 1)
        writer, step = self._opened(), step_of(event)
        for tag, value in scalars(event).items():
            writer.add_scalar(tag, value, step, walltime=record.time_s)
        if isinstance(event, Warned):
            writer.add_text("warnings", event.message, step, walltime=record.time_s)
        if isinstance(event, ValidationDone):
            self._add_pictures(writer, event, record.time_s)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _restart(self, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(str(self._folder), purge_step=first_step)

    def _opened(self) -> SummaryWriter:
        if self._writer is None:
            self._restart(0)
        assert self._writer is not None
        return self._writer

    def _add_pictures(self, writer: SummaryWriter, event: ValidationDone, time_s: float) -> None:
        import numpy as np
        from PIL import Image

        for number, file in enumerate(event.files):
            if file.kind == "image":
                with Image.open(self._run_folder / file.path) as picture:
                    pixels = np.asarray(picture.convert("RGB"))
                tag = f"samples/{number:02d} {file.prompt[:80]}"
                writer.add_image(tag, pixels, event.step, walltime=time_s, dataformats="HWC")


TRACKER = Tracker(open=lambda run: TensorBoardSink(run.logs / "tensorboard", run.folder))
