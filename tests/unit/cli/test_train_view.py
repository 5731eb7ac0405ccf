"""The output of `gracetune train` in terminals of various widths."""

from __future__ import annotations

import io
import logging
import re
import warnings
from contextlib import suppress

import pytest
import torch
from rich.console import Console

from gracetune.cli.library_output import libraries_quiet
from gracetune.cli.log_level import LogLevel, logging_at
from gracetune.cli.train_view import TerminalView, create_progress
from gracetune.errors import Problem
from gracetune.telemetry.progress import RunStatus


def terminal(monkeypatch: pytest.MonkeyPatch) -> TerminalView:
    """A view for a terminal of 80 columns."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    return TerminalView()


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_narrow_terminal_shows_how_far_the_run_is(width: int) -> None:
    status = RunStatus(1234, 20000, 0.1234, "high_noise", 1.52, {"device": 65 * 2**30}, memory_stage=1)
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=True, color_system=None)
    shown = create_progress(console)
    shown.add_task("training", total=20000, completed=1234, more=" · ".join(status.parts()))
    console.print(shown.get_renderable())
    line = written.getvalue().rstrip("\n")
    assert "\n" not in line
    assert "training" in line
    assert "1234/20000" in line
    assert len(line) <= width
    assert ("loss 0.1234 (high_noise)" in line, "ETA 7h 55m" in line) == (width >= 80, width >= 80)
    assert ("device 65.0 GiB" in line) == (width >= 120)
    assert "…" not in line or width < 80


def test_what_a_run_waits_for_is_shown_until_a_bar_shows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an error that the run survives, such as a sample that cannot be generated."""
    view, status = terminal(monkeypatch), RunStatus(1, 9, 0.5)

    def spinning() -> list[str]:
        return [task.description for task in view._progress.tasks if task.visible]

    with view.waiting("preparing the run"):
        assert spinning() == ["preparing the run"]
        with view.phase("caches"):
            assert spinning() == ["caches"]
            view.on_scanned("photos", 1, 2)
            assert spinning() == ["looking at photos"]
        assert spinning() == ["preparing the run"]
    with view.waiting("training"):
        assert spinning() == ["training"]
        view.on_status(status)
        assert [task.total for task in view._progress.tasks if task.visible] == [9]
        with suppress(ValueError), view.phase("samples at step 1"):
            assert sorted(spinning()) == ["samples at step 1", "training"]
            view.on_sample(1, 2, 4)
            (bar,) = (task for task in view._progress.tasks if task.visible and task.description != "training")
            assert (bar.description, bar.completed, bar.total) == ("samples at step 1", 2, 4)
            raise ValueError
        assert spinning() == ["training"]
    assert spinning() == []


def test_lines_are_wrapped_between_words_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"{'word ' * 20}{'/folder' * 20}"
    terminal(monkeypatch).report(text)
    lines = capsys.readouterr().err.splitlines()
    assert [len(line) <= 80 for line in lines] == [True, True, False]
    assert " ".join(" ".join(lines).split()) == text
    monkeypatch.delenv("FORCE_COLOR")
    TerminalView().report(text)
    assert capsys.readouterr().err == f"{text}\n"


def test_the_rows_of_an_error_stay_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"the log: {Problem(f'a{chr(10)}b', 'nothing', 'word ' * 20, 'try again')}"
    rows = ["warning the log: a\\nb", "  found     nothing", f"  expected  {'word ' * 20}", "  try       try again"]
    TerminalView().warn(text)
    assert capsys.readouterr().err.splitlines() == rows
    terminal(monkeypatch).warn(text)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err).splitlines()
    assert (lines[:2], lines[-1]) == (rows[:2], rows[-1])
    assert max(map(len, lines)) <= 80


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
