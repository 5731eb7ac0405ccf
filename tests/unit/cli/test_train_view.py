"""The output of `gracetune train` in terminals of various widths."""

from __future__ import annotations

import io
import logging
import warnings

import pytest
import torch
from rich.console import Console

from gracetune.cli.library_output import libraries_quiet
from gracetune.cli.log_level import LogLevel, logging_at
from gracetune.cli.train_view import bars
from gracetune.telemetry.progress import RunStatus


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_narrow_terminal_shows_how_far_the_run_is(width: int) -> None:
    status = RunStatus(1234, 20000, 0.1234, "high_noise", 1.52, {"device": 65 * 2**30}, memory_stage=1)
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=True, color_system=None)
    shown = bars(console)
    shown.add_task("training", total=20000, completed=1234, more=status.line().partition(" · ")[2])
    console.print(shown.get_renderable())
    line = written.getvalue().rstrip("\n")
    assert "\n" not in line
    assert "training" in line
    assert "1234/20000 loss 0.1234" in line
    assert ("ETA 7h 55m" in line) == (width >= 80)


def test_warnings_without_a_remedy_are_hidden() -> None:
    with warnings.catch_warnings(record=True) as reported, libraries_quiet():
        torch.nn.utils.weight_norm(torch.nn.Linear(2, 2))
        warnings.warn("another one", FutureWarning, stacklevel=1)
    assert [str(one.message) for one in reported] == ["another one"]


def test_a_python_warning_is_reported_without_its_code_line(capsys: pytest.CaptureFixture[str]) -> None:
    reported: list[str] = []
    with libraries_quiet(reported.append):
        warnings.warn("first\n  second", UserWarning, stacklevel=1)
    assert (reported, capsys.readouterr().err) == (["first second"], "")


@pytest.mark.parametrize(("level", "printed"), [("debug", 3), ("info", 2), ("warning", 1)])
def test_the_log_level_decides_which_lines_are_printed(
    level: str, printed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("gracetune.some.part")
    before = logging.getLogger("gracetune").level, [*logging.getLogger("gracetune").handlers]
    with logging_at(LogLevel(level)):
        logger.warning("first")
        logger.info("second")
        logger.debug("third")
    lines = ["WARNING: first", "INFO: second", "DEBUG: third"]
    assert capsys.readouterr().err.splitlines() == lines[:printed]
    assert (logging.getLogger("gracetune").level, logging.getLogger("gracetune").handlers) == before
