"""Arguments that `gracetune train` rejects before it reads anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from gracetune.cli.console import Session
from gracetune.cli.main import main
from gracetune.cli.train import TrainRequest, run_training
from gracetune.config import Environment
from gracetune.errors import ConfigError


@pytest.mark.parametrize("resume", ["", "  "])
def test_an_empty_resume_is_rejected(resume: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_training(TrainRequest(Path("config.yaml"), resume=resume), Session(Environment({})))
    (problem,) = caught.value.problems
    assert (problem.key, problem.expected) == ("--resume", "latest, none or the path of a checkpoint")


def test_an_empty_resume_is_reported_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "config.yaml", "--resume", ""])
    assert caught.value.code == 1
    assert "an unset shell variable may be the cause" in capsys.readouterr().err
