"""The command `gracetune init`: options, questions on a terminal, and errors."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gracetune.config import Environment, load
from runs.launched import command_line
from runs.test_commands import gracetune
from unit.data.folders import images, write


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(write(tmp_path / "work", {}) if (tmp_path / "work").mkdir() else tmp_path / "work")
    return write(Path("photos"), images(12))


def test_flags_answer_every_question(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model", "flux/dev", "--preset", "style", "--trigger", "inky", "--steps", "30")
    assert gracetune("init", str(photos), *flags) == 0
    message = capsys.readouterr()
    assert re.search("next: gracetune (train|estimate) photos.yaml", message.out)  # as much as this machine's memory
    assert "12 images, all with captions" in message.err
    config = load(Path("photos.yaml"), environment=Environment({})).config
    assert (config.model.family, config.model.flavour, config.training.max_steps) == ("flux", "dev", 30)
    assert config.datasets[0].captions.trigger_word == "inky"
    assert config.output_dir == "output/photos"
    assert gracetune("config", "check", "photos.yaml") == 0
    assert "#   https://github.com/ostris/ai-toolkit/" in Path("photos.yaml").read_text()


def test_yes_uses_defaults_and_json_reports_them(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gracetune("init", f"{photos}/", "--yes", "--json") == 0
    message = json.loads(capsys.readouterr().out)
    assert (message["config"], message["preset"], message["model"]) == ("photos.yaml", "character", "sdxl/base-1.0")
    assert (message["files"], message["captioned"], message["steps"]) == (12, 12, 960)


def test_unreadable_files_are_named(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "000.png").write_bytes(b"no image")
    assert gracetune("init", str(photos), "--yes", "--json") == 0
    message = capsys.readouterr()
    assert json.loads(message.out)["unreadable"] == ["000.png"]
    words = " ".join(message.err.split())
    assert "warning left out, unreadable: 1 of 12 files; training stops above 5%" in words
    assert "000.png: not an image" in words


def test_without_a_terminal_missing_options_are_an_error(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gracetune("init", str(photos), "--steps", "30") == 1
    message = capsys.readouterr().err
    assert "--model, --trigger, --preset" in message
    assert "gracetune init photos --yes" in message
    assert not Path("photos.yaml").exists()


def test_nothing_is_overwritten(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("photos.yaml").write_text("mine")
    assert gracetune("init", str(photos), "--yes") == 1
    message = capsys.readouterr().err
    assert "gracetune train photos.yaml" in message
    assert Path("photos.yaml").read_text() == "mine"
    assert gracetune("init", str(photos), "--yes", "--output", "photos-2.yaml") == 0
    assert load(Path("photos-2.yaml"), environment=Environment({})).config.output_dir == "output/photos-2"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "fluxx"), "--model flux"),
        (("--preset", "charakter"), "--preset character"),
        (("--output", "photos.json"), "a file ending in .yaml"),
        (("--model", "photos"), "without model_index.json"),
    ],
)
def test_invalid_options_are_rejected(
    flags: tuple[str, ...], words: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gracetune("init", str(photos), "--yes", *flags) == 1
    assert words in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in Path().iterdir()] == ["photos"]


def test_a_terminal_is_asked_for_missing_options(photos: Path) -> None:
    """It asks at most five questions, and repeats a question after an invalid answer."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *command_line("init", str(photos))], stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True
    )
    os.close(theirs)
    os.write(ours, b"style\nfluxx\nflux\n\n40\n")
    heard = b""
    while True:
        try:
            heard += os.read(ours, 4096)
        except OSError:  # the terminal was closed with the process
            break
    assert process.wait() == 0, heard.decode()
    text = heard.decode()
    assert "--model flux" in text
    assert text.count("]: ") == 5  # four questions with their defaults, one of them twice
    config = load(Path("photos.yaml"), environment=Environment({})).config
    assert (config.model.family, config.training.max_steps) == ("flux", 40)
    assert config.datasets[0].captions.trigger_word is None
