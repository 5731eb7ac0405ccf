"""The trackers a config can name. Each is a record in `telemetry/sinks/`, found by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import AfterValidator

from gracetune.config.registry import Registry
from gracetune.telemetry.dispatcher import Tracker

TRACKERS: Final[Registry] = Registry.find(
    "tracker",
    "gracetune.trackers",
    {
        "tensorboard": "gracetune.telemetry.sinks.tensorboard:TRACKER",
        "wandb": "gracetune.telemetry.sinks.wandb:TRACKER",
    },
)
_NAMES: Final[tuple[str, ...]] = TRACKERS.names


def tracker(name: str) -> Tracker:
    return TRACKERS.load_as(name, Tracker)


def _importable(name: str) -> str:
    """`config check` already names a package that is broken, not only a run."""
    tracker(name)
    return name


if TYPE_CHECKING:
    TrackerName = str  # what is installed is not known to a type checker
else:
    TrackerName = Annotated[Literal[_NAMES], AfterValidator(_importable)]
