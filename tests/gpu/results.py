"""Results of GPU test runs, merged into one file: the newest outcome of each test, and every run with its order's seed.

The file is written again after each test, so a run that is killed leaves everything up to that point and names the test
it was in. It holds no path of a machine. `pytest --gpu-results FOLDER` writes `FOLDER/gpu-tests-GPU.json`.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import pytest

FORMAT: Final = 1
Outcome = Literal["passed", "failed", "skipped"]
Test = TypeVar("Test")
_WORSE: Final[Mapping[str, int]] = {"passed": 0, "skipped": 1, "failed": 2}
_ABSOLUTE_PATH: Final = re.compile(r"(?<![\w.])/(?:[\w.+@-]+/)+[\w.+@-]*")
_LONGEST_REASON: Final = 300


@dataclass(frozen=True)
class Circumstances:
    """What a run's outcomes depend on, beside the code."""

    git_commit: str | None
    torch: str
    driver: str
    gpu: str


def this_machine() -> Circumstances:
    import torch

    from gracetune.bench.results import git_commit
    from gracetune.hardware import probe

    machine = probe()
    driver = machine.host.nvidia_kernel_driver or machine.driver.cuda_version or "unknown"
    commit = git_commit() or os.environ.get("COMMIT")  # a copy of the checkout without .git gets its commit here
    return Circumstances(commit, torch.__version__, str(driver), torch.cuda.get_device_name(0))


def file_for(folder: Path, gpu: str) -> Path:
    """`NVIDIA H200` -> `gpu-tests-h200.json`."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia")).strip("-")
    return folder / f"gpu-tests-{name}.json"


def without_paths(text: str) -> str:
    """The first line, with absolute paths replaced: the file is public."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return _ABSOLUTE_PATH.sub("PATH", line)[:_LONGEST_REASON]


def in_random_order(tests: Sequence[Test], is_ours: Callable[[Test], bool], seed: int) -> list[Test]:
    """Ours change places among themselves; the others stay where they are."""
    ours = [test for test in tests if is_ours(test)]
    random.Random(seed).shuffle(ours)
    coming = iter(ours)
    return [next(coming) if is_ours(test) else test for test in tests]


@dataclass
class GpuTestResults:
    """The file of one GPU, with one run under way."""

    file: Path
    circumstances: Circumstances
    seed: int
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    _outcomes: dict[str, Outcome] = field(default_factory=dict)
    _run: dict[str, Any] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(
        cls, file: Path, circumstances: Circumstances, seed: int, *, selected: int, existing: Collection[str]
    ) -> GpuTestResults:
        """`existing` are the ids of all tests in the collected files: others of these files were removed."""
        before: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        files = {name.partition("::")[0] for name in existing}
        tests = {
            name: test
            for name, test in before.get("tests", {}).items()
            if name in existing or name.partition("::")[0] not in files
        }
        results = cls(file, circumstances, seed, tests, [*before.get("runs", [])])
        results._run = {
            "seed": seed, "date": datetime.now(UTC).isoformat(timespec="seconds"), **vars(circumstances),
            "selected": selected, "passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0, "ended": False,
            "running": None,
        }  # fmt: skip
        results.runs.append(results._run)
        return results

    def started(self, test: str) -> None:
        self._run["running"] = test
        self.write()

    def done(self, test: str, outcome: Outcome, seconds: float, reason: str = "") -> None:
        """One phase of a test (set-up, call, tear-down): the worst outcome counts, and the seconds add up."""
        known = self._outcomes.get(test)
        earlier = self.tests[test] if known is not None else {}
        worst = outcome if known is None or _WORSE[outcome] > _WORSE[known] else known
        self._outcomes[test] = worst
        found: dict[str, Any] = {
            "outcome": worst, "seconds": round(seconds + earlier.get("seconds", 0.0), 3), "seed": self.seed,
            "git_commit": self.circumstances.git_commit,
        }  # fmt: skip
        if worst != "passed" and (why := earlier.get("reason") or without_paths(reason)):
            found["reason"] = why
        self.tests[test] = found

    def finished(self, test: str) -> None:
        self._run["running"] = None
        self.write()

    def end(self) -> None:
        self._run["ended"] = True
        self.write()

    def as_json(self) -> dict[str, Any]:
        self._run |= {name: sum(one == name for one in self._outcomes.values()) for name in _WORSE}
        self._run["seconds"] = round(time.monotonic() - self._began, 1)
        newest = [test["outcome"] for test in self.tests.values()]
        return {
            "format": FORMAT,
            "bench": "gpu_tests",
            **{name: newest.count(name) for name in ("passed", "failed", "skipped")},
            "seeds": sorted({run["seed"] for run in self.runs}),
            **vars(self.circumstances),
            "runs": self.runs,
            "tests": dict(sorted(self.tests.items())),
        }

    def write(self) -> None:
        """Whole or not at all: the process may be killed at any moment."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_name(f".{self.file.name}.tmp")
        temporary.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.file)


class Recorder:
    """The pytest plugin that fills a `GpuTestResults`."""

    def __init__(self, results: GpuTestResults) -> None:
        self.results = results

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.results.started(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reason = ""
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2]
        elif report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash is not None else report.longreprtext
        self.results.done(report.nodeid, report.outcome, report.duration, reason)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.results.finished(nodeid)

    def pytest_sessionfinish(self) -> None:
        self.results.end()
