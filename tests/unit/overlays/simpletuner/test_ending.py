"""The end of a run: everything is closed and told, whatever goes wrong on the way."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from gracetune_simpletuner import telling
from gracetune_simpletuner.overlay import Launch, Overlay
from gracetune_simpletuner.telemetry import Telemetry

from gracetune.config.environment import Environment

FILE = "gracetune-overlay.jsonl"


def reject() -> None:
    raise OSError("cannot be unmapped")


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


@pytest.fixture
def closed() -> list[str]:
    return []


@pytest.fixture
def overlay(tmp_path: Path, closed: list[str]) -> Overlay:
    """With three things to close, of which the middle one cannot be."""
    made = Overlay(Environment({}), Launch(), output_dir=tmp_path)
    made.start_telling()
    made.at_end += [lambda: closed.append("first"), reject, lambda: closed.append("last")]
    return made


def test_what_cannot_be_closed_keeps_nothing_else_open_and_is_told(
    overlay: Overlay, closed: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overlay.finish()
    assert closed == ["last", "first"]
    assert [line["event"] for line in lines(tmp_path)] == ["not_closed", "finished"]
    assert lines(tmp_path)[0]["error"] == "OSError: cannot be unmapped"
    assert "cannot be unmapped" in caplog.text


def test_an_error_of_upstreams_stays_the_error(overlay: Overlay, closed: list[str]) -> None:
    def training() -> None:
        raise ValueError("upstream's own")

    with pytest.raises(ValueError, match="upstream's own"):
        telling._train(overlay, training)
    assert closed == ["last", "first"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_said_once_and_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / FILE
    file.symlink_to("/dev/full")
    telemetry = Telemetry()
    telemetry.emit("waiting")
    with caplog.at_level(logging.WARNING, "gracetune.overlay"):
        telemetry.open(tmp_path, rank=0)
        telemetry.emit("second")
        assert [record.getMessage() for record in caplog.records] == [
            "gracetune: telemetry is missing lines: [Errno 28] No space left on device"
        ]
    file.unlink()  # room again
    telemetry.finish()
    assert [line["event"] for line in lines(tmp_path)] == ["finished"]


def test_an_output_folder_that_cannot_be_made_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "output").write_text("a file")
    telemetry = Telemetry()
    telemetry.open(tmp_path / "output", rank=0)
    telemetry.emit("first")
    assert "missing lines" in caplog.text
