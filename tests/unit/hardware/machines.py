"""The modelled machines, and the call log of the fake libcuda."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

from gracetune.hardware.driver import DriverFacts
from gracetune.hardware.machine import Machine
from gracetune.hardware.recording import load_recording

MACHINES = Path(__file__).parents[2] / "fixtures" / "machines"
NAMES = sorted(folder.name for folder in MACHINES.iterdir())


def load(name: str) -> Machine:
    return load_recording(MACHINES / name)


class ReplayDriver:
    """A driver that returns recorded facts."""

    def __init__(self, recorded: DriverFacts) -> None:
        self._recorded = recorded

    def facts(self, *, free_memory: bool) -> DriverFacts:
        return self._recorded


@dataclass(frozen=True)
class FakeCuda:
    """The compiled substitute for libcuda, and its call log."""

    path: str
    journal: ctypes.CDLL

    def fail(self, location: str, code: int) -> None:
        places = ["nothing", "init", "context", "alloc", "memset", "sync", "free"]
        self.journal.fake_reset(places.index(location), code, 0)

    def one_pool(self) -> None:
        self.journal.fake_reset(0, 0, 1)

    @property
    def live_blocks(self) -> int:
        self.journal.fake_live_blocks.restype = ctypes.c_int64
        return int(self.journal.fake_live_blocks())

    @property
    def largest(self) -> int:
        self.journal.fake_largest.restype = ctypes.c_size_t
        return int(self.journal.fake_largest())

    @property
    def open_contexts(self) -> int:
        return int(self.journal.fake_contexts())

    @property
    def contexts_opened(self) -> int:
        return int(self.journal.fake_contexts_opened())
