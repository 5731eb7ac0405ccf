"""What happens to a run: cases that are functions of their names alone.

`kill:native-lora:17` is the kind, the scenario and the seed. A case disturbs the first start of a run, and now and then
the second; then the same command runs undisturbed.
"""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

from faults.injection import Fault, Operation
from storm.scenarios import SCENARIOS

WRITING: Final[tuple[Operation, ...]] = (
    "open", "write", "sync", "rename", "link", "unlink", "mkdir", "lock", "truncate",
)  # fmt: skip
"""Between these a killed process leaves something else behind."""
_DISK: Final = (errno.EIO, errno.ESTALE)
_FULL: Final = (*_DISK, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_NAMES: Final = (*_FULL, errno.EACCES)
ERRORS: Final[dict[Operation, tuple[int | Literal["short"], ...]]] = {
    "open": (*_NAMES, errno.EMFILE), "read": _DISK, "write": (*_FULL, "short", "short"), "sync": _FULL,
    "rename": _NAMES, "link": _NAMES, "unlink": (*_DISK, errno.EROFS, errno.EACCES), "mkdir": _NAMES,
    "stat": (*_DISK, errno.EACCES), "list": (*_DISK, errno.EACCES, errno.EMFILE), "lock": (*_DISK, errno.ENOLCK),
    "truncate": _FULL, "room": _DISK, "map": (errno.ENOMEM, errno.ENODEV, errno.EAGAIN),
}  # fmt: skip
"""What each operation can fail with."""
SIGNALS: Final[tuple[Literal["term", "hup"], ...]] = ("term", "hup")
_RANDOM: Final = re.compile(r"[0-9a-f]{32}|(?<=-)[0-9a-f]{16}(?=\.json)|tfevents\..*")
_AGAIN: Final = 0.3
"""How often the second start is disturbed too."""


@dataclass(frozen=True)
class Calls:
    """The file operations of an undisturbed run."""

    lines: tuple[tuple[str, str], ...]
    """Operation and path."""
    seconds: float

    def choose(self, seeded: random.Random, operations: Sequence[str]) -> tuple[Operation, int]:
        """An operation, and how many of its kind come before. All paths are equally likely, however frequent."""
        kinds: dict[tuple[str, str], list[int]] = {}
        before: dict[str, int] = {}
        for operation, path in self.lines:
            number = before[operation] = before.get(operation, -1) + 1
            if operation in operations:
                kinds.setdefault((operation, _RANDOM.sub("*", path)), []).append(number)
        kind = seeded.choice(sorted(kinds))
        return cast(Operation, kind[0]), seeded.choice(kinds[kind])


@dataclass(frozen=True)
class Disturbance:
    """Of one start."""

    fault: Fault | None = None
    kill_after: float | None = None

    def __str__(self) -> str:
        if self.fault is None:
            return f"SIGKILL after {self.kill_after:.2f} s"
        action = self.fault.action
        name = errno.errorcode[action] if isinstance(action, int) else action
        return f"{name} at {self.fault.operation} {self.fault.after + 1}{'' if self.fault.times else ' and later'}"


@dataclass(frozen=True)
class Case:
    kind: str
    """kill, clock, signal or the name of an operation that fails."""
    scenario: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.scenario}:{self.seed}"

    @classmethod
    def parse(cls, text: str) -> Case:
        kind, scenario, seed = text.split(":")
        if kind not in KINDS or scenario not in SCENARIOS:
            raise ValueError(f"{text}: not KIND:SCENARIO:SEED with one of {', '.join(KINDS)}; {', '.join(SCENARIOS)}")
        return cls(kind, scenario, int(seed))

    @property
    def group(self) -> str:
        """For tables."""
        return self.kind if self.kind in _SUDDEN else "file error"

    def disturbances(self, calls: Calls, pattern: str) -> Iterator[Disturbance]:
        seeded = random.Random(str(self))
        yield self._disturbance(seeded, calls, pattern)
        if seeded.random() < _AGAIN:
            yield self._disturbance(seeded, calls, pattern)

    def _disturbance(self, seeded: random.Random, calls: Calls, pattern: str) -> Disturbance:
        if self.kind == "clock":
            return Disturbance(kill_after=seeded.uniform(0.05, calls.seconds))
        if self.kind in _SUDDEN:
            operation, after = calls.choose(seeded, WRITING)
            sent = "kill" if self.kind == "kill" else seeded.choice(SIGNALS)
            return Disturbance(Fault(pattern, operation, sent, after, times=1))
        operation, after = calls.choose(seeded, [self.kind])
        return Disturbance(Fault(pattern, operation, seeded.choice(ERRORS[operation]), after, seeded.choice((0, 1))))


_SUDDEN: Final = ("kill", "clock", "signal")
KINDS: Final = (*_SUDDEN, *ERRORS)
_WITHOUT_LINKS: Final = "native-full"
"""It has no samples or adapters, whose caches and files are published by links."""


def lane() -> list[Case]:
    """The cases of `make test-full`: 60 kills, 12 signals, and every file operation that fails in every dialect."""
    names = [*SCENARIOS]
    kills = [Case("clock" if seed % 8 == 7 else "kill", names[seed % len(names)], seed) for seed in range(60)]
    signals = [Case("signal", names[seed % len(names)], seed) for seed in range(12)]
    return [*kills, *signals, *_faults(0)]


def storm(count: int, seed: int) -> list[Case]:
    """Half of them kills, an eighth signals, the others file errors; other seeds than those of the lane."""
    seeded = random.Random(seed)
    faults = [case for round_ in range(count // 42 + 1) for case in _faults(1000 * (seed + 1) + round_)]
    found = []
    for number in range(count):
        name, own = [*SCENARIOS][seeded.randrange(len(SCENARIOS))], 1000 * (seed + 1) + number
        if number % 8 < 4:
            found.append(Case("clock" if number % 32 == 3 else "kill", name, own))
        else:
            found.append(Case("signal", name, own) if number % 8 == 4 else faults.pop(0))
    return found


def _faults(seed: int) -> list[Case]:
    """One for each operation and dialect; scenarios of a dialect take turns."""
    found = []
    for dialect in dict.fromkeys(scenario.dialect for scenario in SCENARIOS.values()):
        for number, operation in enumerate(ERRORS):
            names = [name for name, one in SCENARIOS.items() if one.dialect == dialect]
            if operation == "link":
                names = [name for name in names if name != _WITHOUT_LINKS]
            found.append(Case(operation, names[(seed + number) % len(names)], seed))
    return found
