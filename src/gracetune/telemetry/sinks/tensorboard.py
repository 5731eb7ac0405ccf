"""The TensorBoard sink: curves and generated images."""

from __future__ import annotations

import errno
import io
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gracetune.telemetry.dispatcher import Tracker
from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.events import Event, Record, RunStarted, ValidationDone, Warned, step_of
from gracetune.telemetry.sinks.scalars import scalars


class TensorBoardSink:
    """Writes a folder of event files. Steps that a resumed run repeats replace the earlier ones."""

    name = "TensorBoard"

    def __init__(self, folder: Path, run_folder: Path) -> None:
        """Paths in events are relative to `run_folder`."""
        try:
            import torch.utils.tensorboard  # noqa: F401 - report a missing package at the start, not at step 10
        except ImportError as error:
            raise TelemetryError(
                "logging.trackers: tensorboard",
                found=f"it cannot be imported: {error}",
                expected="the package tensorboard",
                hint="pip install tensorboard, or --set logging.trackers=[]",
            ) from None
        self._folder, self._run_folder = folder, run_folder
        self._file: _EventFile | None = None

    def write(self, record: Record) -> None:
        event = record.event
        if isinstance(event, RunStarted):
            self._restart(0 if event.resumed_step is None else event.resumed_step + 1)
        file, step = self._opened(), step_of(event)
        file.write(self._summaries(event), step, record.time_s)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _restart(self, first_step: int) -> None:
        self.close()
        self._file = _EventFile(self._folder, first_step)

    def _opened(self) -> _EventFile:
        if self._file is None:
            self._restart(0)
        assert self._file is not None
        return self._file

    def _summaries(self, event: Event) -> list[Any]:
        from torch.utils.tensorboard import summary

        found = [summary.scalar(tag, value) for tag, value in scalars(event).items()]
        if isinstance(event, Warned):
            found.append(summary.text("warnings", event.message))
        if isinstance(event, ValidationDone):
            found += self._images(event)
        return found

    def _images(self, event: ValidationDone) -> Iterator[Any]:
        import numpy as np
        from PIL import Image
        from torch.utils.tensorboard import summary

        for number, file in enumerate(event.files):
            if file.kind == "image":
                with Image.open(self._run_folder / file.path) as image:
                    pixels = np.asarray(image.convert("RGB"))
                yield summary.image(f"samples/{number:02d} {file.prompt[:80]}", pixels, dataformats="HWC")


class _EventFile:
    """One TensorBoard event file, written in the thread that emits.

    Torch's SummaryWriter writes in a thread of its own. On a full disk that thread ends with a traceback, and the
    events it had queued are lost.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        """`SessionLog.START` makes TensorBoard drop the steps from `first_step` on in earlier files of the folder."""
        from tensorboard.compat.proto.event_pb2 import Event as Entry
        from tensorboard.compat.proto.event_pb2 import SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._file = _new_file(folder)
        now = time.time()
        self._append(
            Entry(wall_time=now, file_version="brain.Event:2"),
            Entry(wall_time=now, step=first_step, session_log=SessionLog(status=SessionLog.START)),
        )

    def write(self, summaries: Iterable[Any], step: int | None, time_s: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Entry

        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the file or its folder was removed", str(self._path))
        self._append(*(Entry(wall_time=time_s, step=step, summary=one) for one in summaries))

    def _append(self, *entries: Any) -> None:
        """Write the entries now, unbuffered. An entry is incomplete only if the disk is full."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        packed = io.BytesIO()
        for entry in entries:
            RecordWriter(packed).write(entry.SerializeToString())
        left = packed.getbuffer()
        while left:
            left = left[self._file.write(left) :]

    def close(self) -> None:
        self._file.close()


def _new_file(folder: Path) -> tuple[Path, io.FileIO]:
    """A new event file. The name begins with the time, because TensorBoard reads a folder's files in name order."""
    number = 0
    while True:
        path = folder / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{number}"
        try:
            return path, io.FileIO(path, "xb")
        except FileExistsError:
            number += 1


TRACKER = Tracker(open=lambda run: TensorBoardSink(run.logs / "tensorboard", run.folder))
