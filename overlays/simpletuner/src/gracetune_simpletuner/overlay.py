"""The overlay of one process: its options, its hooks and its log."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gracetune.extension import Environment
from gracetune_simpletuner.hooks import Around, Installer
from gracetune_simpletuner.options import OverlayOptions
from gracetune_simpletuner.points import Feature, hooks_of
from gracetune_simpletuner.telemetry import Telemetry

logger = logging.getLogger("gracetune.overlay")


@dataclass(frozen=True)
class Launch:
    """This process among the processes of its launch, from the launcher's environment variables."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1
    key: str = ""

    @classmethod
    def of(cls, environment: Environment) -> Launch:
        def number(name: str, default: int) -> int:
            text = environment.get(name) or ""
            return int(text) if text.isdecimal() else default

        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        # Ranks of one launch usually have the same parent process. The launcher's own ids cover other cases.
        stated = "\0".join(environment.get(name) or "" for name in names)
        return cls(
            rank=number("RANK", 0),
            count=number("WORLD_SIZE", 1),
            local_rank=number("LOCAL_RANK", 0),
            local_count=number("LOCAL_WORLD_SIZE", 1),
            key=f"{os.getppid()}\0{stated}",
        )


@dataclass
class Overlay:
    """The state that all features share. There is one per process, referenced only by the installed wrappers."""

    environment: Environment
    launch: Launch
    installer: Installer = field(default_factory=Installer)
    telemetry: Telemetry = field(default_factory=Telemetry)
    options: OverlayOptions = field(default_factory=OverlayOptions)
    blocks: dict[str, Any] = field(default_factory=dict)
    """Our blocks of the config, as written."""
    output_dir: Path | None = None
    at_end: list[Callable[[], None]] = field(default_factory=list)
    _active: set[Feature] = field(default_factory=set)

    def activate(self, feature: Feature, wrappers: Mapping[str, Around]) -> None:
        """Attach a feature once. `wrappers` must have exactly the targets that `points` declares for it."""
        if feature in self._active:
            return
        declared = hooks_of(feature)
        if {hook.target for hook in declared} != set(wrappers):
            raise ValueError(f"{feature} wraps {sorted(wrappers)} and declares {[hook.target for hook in declared]}")
        for hook in declared:
            self.installer.wrap(hook, wrappers[hook.target])
        self._active.add(feature)
        self.note(f"{feature}: attached", feature=feature, wrapped=[hook.target for hook in declared])

    def note(self, text: str, event: str = "attached", **content: Any) -> None:
        logger.info("gracetune: %s", text)
        self.telemetry.emit(event, note=text, **content)

    def start_telling(self) -> None:
        """Open the log file, as soon as a feature is used."""
        if self.output_dir is not None:
            self.telemetry.open(self.output_dir, self.launch.rank)

    def finish(self) -> None:
        """Close everything. An error while closing is logged, and hides neither other errors nor upstream's own."""
        while self.at_end:
            close = self.at_end.pop()
            try:
                close()
            except Exception as error:  # whatever fails here, the rest must be closed too
                logger.warning("gracetune: not closed in order", exc_info=True)
                self.telemetry.emit("not_closed", error=f"{type(error).__name__}: {error}")
        self.telemetry.finish()
