"""A run's folder that an earlier version wrote (tests/fixtures/older_run) is continued, reported on and picked from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from runs.launched import ROOT
from runs.made_runs import TinyModel
from runs.test_commands import gracetune


def test_the_folder_of_an_earlier_version(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "tests" / "fixtures" / "older_run", tmp_path / "job")
    monkeypatch.chdir(tmp_path / "job")
    Path("model").symlink_to(tiny_model("wan", "t2v-1.3b-2.1"))

    assert gracetune("report", "out") == 0
    assert gracetune("train", "job.yaml", "--max-steps", "3") == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "resumes from checkpoint-2, the latest" in printed
    assert "checkpoint-2 was written by an earlier release" in printed
    assert "encoded" not in printed, "its caches are used"
    events = [json.loads(line) for line in Path("out/logs/events.jsonl").read_text().splitlines()]
    assert [one["step"] for one in events if one["kind"] == "StepDone"] == [1, 2, 3]

    assert gracetune("adapter", "pick", "out", "--json") == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)["candidates"]] == [3]
