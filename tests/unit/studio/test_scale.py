"""Many runs and long logs. Limits are in processor time, because other programs may use the machine; on an idle one the
time that passes is the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from gracetune.studio.run_list import RunList
from gracetune.studio.run_log import RunLog
from gracetune.studio.run_rows import RunSummary
from gracetune.studio.run_series import series
from unit.studio.logs import long_log, small_run

Value = TypeVar("Value")


def timed(work: Callable[[], Value]) -> tuple[Value, float]:
    began = time.process_time()
    return work(), time.process_time() - began


def test_a_long_log_is_sampled_and_followed(tmp_path: Path) -> None:
    """The same log, and its first lines only, so that all steps are parsed: the curves agree."""
    run = long_log(tmp_path / "long", 40_000)
    log = RunLog(run)
    log.update()
    found = series(log, 500)
    assert log.unreadable == 0
    assert log.count("StepDone") == 40_999
    assert set(found["loss"]) == {"high_noise", "low_noise"}
    for curve in found["loss"].values():
        assert curve["step"] == sorted(set(curve["step"])), "no step that was done again"
        assert curve["step"][-1] > 39_000
        assert 200 < len(curve["step"]) <= 1000
        assert all(value == pytest.approx(1 / (1 + step / 1000), abs=1e-4)
                   for step, value in zip(curve["step"], curve["value"], strict=True))  # fmt: skip
    assert [one["message"] for one in log.events("Warned")] == ["only once"]
    assert found["memory"]["host"]["step"][-1] == 40_000
    with (run / "logs" / "events.jsonl").open("ab") as file:
        file.write(b'{"v":3,"kind":"StepDone","time_s":1,"step":40001,"epoch":1,"loss":7.0,"step_ms":1}\n{"v":3,"ki')
    log.update()
    assert log.last("StepDone")["step"] == 40_001
    assert log.unreadable == 0


def test_the_row_of_a_long_log_knows_its_middle(tmp_path: Path) -> None:
    """Head and tail at once, the rest little by little: the warning and the second start are in the middle."""
    summary = RunSummary(long_log(tmp_path / "long", 40_000))
    assert summary.refresh()
    assert summary.event("StepDone")["step"] == 40_000
    assert summary.warnings == 0
    while summary.search_middle(1 << 20):
        pass
    assert summary.warnings == 1
    assert summary.event("RunStarted")["resumed_step"] == 30_000


def test_a_hundred_runs_are_listed_fast(tmp_path: Path) -> None:
    for number in range(100):
        small_run(tmp_path / f"group{number % 10}" / f"run{number}", 100)
    runs = RunList(tmp_path)
    rows, first = timed(runs.rows)
    assert len(rows) == 100
    assert first < 0.15
    assert timed(runs.rows)[1] < 0.03


@pytest.mark.full
def test_a_thousand_runs_are_listed_in_300_ms(tmp_path: Path) -> None:
    for number in range(1000):
        small_run(tmp_path / f"group{number % 10}" / f"run{number}", 100)
    runs = RunList(tmp_path)
    assert timed(runs.rows)[1] < 1.5, "the first time, which the studio does while it starts"
    for _ in range(3):
        rows, spent = timed(runs.rows)
        assert len(rows) == 1000
        assert spent < 0.3


@pytest.mark.full
def test_a_run_with_a_million_events_opens_within_a_second(tmp_path: Path) -> None:
    log = RunLog(long_log(tmp_path / "long", 990_000))

    def opened() -> int:
        log.update()
        return len(series(log, 2000)["grad_norm"]["step"])

    points, spent = timed(opened)
    assert 1000 <= points <= 2000
    assert spent < 1.0
    assert timed(opened)[1] < 0.3
