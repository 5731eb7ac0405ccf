"""The machine's report and the baselines below the studio's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gracetune.studio import machine_pages
from gracetune.studio.machine_memory import MachineMemory
from unit.baselines.sample_baselines import baseline
from unit.studio.clients import client_of


def capture(folder: Path, ms: float, **changes: object) -> None:
    folder.mkdir(parents=True)
    (folder / "baseline.json").write_text(baseline((ms,) * 30, **changes).to_json())


def test_baselines_are_compared_with_the_one_before(tmp_path: Path) -> None:
    capture(tmp_path / "baseline" / "one", 100.0, name="cats", date="2026-11-01T00:00:00Z")
    capture(tmp_path / "deep" / "er" / "two", 150.0, name="cats", date="2026-11-02T00:00:00Z")
    capture(tmp_path / "baseline" / "dogs", 100.0, name="dogs")
    capture(tmp_path / "cats" / "checkpoints" / "no", 100.0)
    (tmp_path / "linked").symlink_to(tmp_path / "baseline")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "baseline.json").write_text("{")
    found = client_of(tmp_path).get("baselines")
    assert [one["path"] for one in found["baselines"]] == ["baseline/one", "deep/er/two", "baseline/dogs"]
    assert found["baselines"][0]["step_ms"] == 100.0
    (compared,) = found["comparisons"]
    assert (compared["a"], compared["b"], compared["why"]) == ("baseline/one", "deep/er/two", "")
    assert compared["regression"]
    assert {"name", "before", "after", "ratio", "verdict"} <= {*compared["rows"][0]}
    assert [one["path"] for one in found["unreadable"]] == ["broken"]
    assert found["incomplete"] == ""


def test_a_search_that_reaches_its_limit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        capture(tmp_path / name, 100.0)
    for limit, words in (("MOST_BASELINES", "1 baselines"), ("MOST_FOLDERS", "1 folders")):
        with monkeypatch.context() as changed:
            changed.setattr(machine_pages, limit, 1)
            found = machine_pages.baselines(tmp_path)
        assert f"ended after {words}" in found["incomplete"]
        assert len(found["baselines"]) == (limit == "MOST_BASELINES")


def test_baselines_that_cannot_be_compared_say_why(tmp_path: Path) -> None:
    capture(tmp_path / "one", 100.0, date="2026-11-01T00:00:00Z")
    capture(tmp_path / "two", 100.0, date="2026-11-02T00:00:00Z", config_fingerprint="0" * 32, config={"a": 1})
    (compared,) = client_of(tmp_path).get("baselines")["comparisons"]
    assert compared["why"]
    assert compared["rows"] == []


def test_the_doctor_examines_once_and_again_on_request(tmp_path: Path) -> None:
    client = client_of(tmp_path)
    report = client.get("machine")
    assert {check["status"] for check in report["checks"]} <= {"ok", "warn", "fail", "skip", "info"}
    assert report["machine"]
    assert client.get("machine") == report
    assert client.post("machine/refresh")["made_s"] > report["made_s"]
    assert client_of(tmp_path, control=False).rejected("POST", "machine/refresh")[0] == 403


def test_the_largest_processes_are_named() -> None:
    found = MachineMemory().others(gpu=False, but=os.getpid())
    assert found == sorted(found, key=lambda one: -one["bytes"])
    assert os.getpid() not in [one["pid"] for one in found]
    assert all(one["bytes"] >= 64 << 20 for one in found)
    kept = bytearray(b"x") * (300 << 20)
    own = next((one for one in MachineMemory().others(gpu=False, but=0) if one["pid"] == os.getpid()), None)
    assert len(kept) == 300 << 20
    if own is not None:  # eight others may be larger
        assert own["bytes"] > len(kept)
        assert own["name"]
