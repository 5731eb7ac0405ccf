"""The trackers that `logging.trackers` can name. Their records are in `telemetry/sinks/`, found by name."""

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
    """Load the record now, so that `config check` reports a broken package."""
    tracker(name)
    return name


if TYPE_CHECKING:
    TrackerName = str  # a type checker cannot know which packages are installed
else:
    TrackerName = Annotated[Literal[_NAMES], AfterValidator(_importable)]
