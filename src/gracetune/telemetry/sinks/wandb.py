"""The wandb sink. The package is optional and imported only if the config selects it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from gracetune.telemetry.dispatcher import Tracker
from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.events import Record, RunEnded, RunStarted, ValidationDone, Warned, step_of
from gracetune.telemetry.schema import to_json
from gracetune.telemetry.sinks.scalars import scalars

_OUR_STEP = "step"


def import_wandb() -> Any:
    """The wandb package. Raises TelemetryError if it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise TelemetryError(
            "logging.trackers: wandb",
            found=f"it cannot be imported: {error}",
            expected="the package wandb",
            hint='pip install wandb, or --set logging.trackers=["tensorboard"]',
        ) from None


class WandbSink:
    name = "wandb"

    def __init__(self, project: str, run_folder: Path) -> None:
        self._wandb = import_wandb()
        self._project, self._run_folder = project, run_folder
        self._run: Any = None

    def write(self, record: Record) -> None:
        event = record.event
        if isinstance(event, RunStarted):
            self._begin(event, record)
        if self._run is None:
            return  # no RunStarted yet, so there is no wandb run
        found: dict[str, Any] = dict(scalars(event))
        if isinstance(event, ValidationDone):
            found["samples"] = [
                self._wandb.Image(str(self._run_folder / file.path), caption=file.prompt)
                for file in event.files
                if file.kind == "image"
            ]
        if isinstance(event, Warned):
            self._run.alert(title="gracetune", text=event.message)
        if found:
            # wandb's own step cannot go back, but a resumed run repeats steps and a step has several events. So our
            # step is logged as a value, which `_begin` defines as the x axis.
            self._run.log({**found, _OUR_STEP: step_of(event)})
        if isinstance(event, RunEnded):
            self._end(0 if event.outcome == "finished" else 1)

    def close(self) -> None:
        self._end(1)  # still open only if there was no RunEnded

    def _begin(self, event: RunStarted, record: Record) -> None:
        config = to_json(record)["config"]
        folder = str(self._run_folder)
        self._run = self._wandb.init(
            project=self._project, name=event.run, config=config, dir=folder, reinit="finish_previous"
        )
        self._run.define_metric(_OUR_STEP)
        self._run.define_metric("*", step_metric=_OUR_STEP)

    def _end(self, code: int) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=code)


TRACKER = Tracker(open=lambda run: WandbSink(run.project, run.folder), check=import_wandb)
