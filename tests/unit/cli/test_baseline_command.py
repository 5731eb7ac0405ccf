"""The command `gracetune baseline compare`. Tests of `capture` are in tests/runs/test_baseline.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gracetune.baselines.baseline import FILE, Baseline
from gracetune.cli.main import main
from unit.baselines.sample_baselines import baseline


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


def stored(folder: Path, made: Baseline) -> str:
    folder.mkdir()
    (folder / FILE).write_text(made.to_json())
    return str(folder)


@pytest.fixture
def fast(tmp_path: Path) -> str:
    return stored(tmp_path / "fast", baseline())


@pytest.fixture
def slow(tmp_path: Path) -> str:
    return stored(tmp_path / "slow", baseline((110.0,) * 30))


def test_a_regression_is_exit_code_1_and_in_the_table(fast: str, slow: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("baseline", "compare", fast, slow) == 1
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[:3]] == ["before", "step", "throughput"]
    assert "REGRESSION beyond 5.0% in step time, throughput" in text
    assert exit_code("baseline", "compare", fast, slow, "--tolerance", "15%") == 0
    assert "no regression beyond 15.0%" in capsys.readouterr().out
    assert exit_code("baseline", "compare", slow, fast) == 0


def test_stdout_holds_only_the_json(fast: str, slow: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("baseline", "compare", fast, slow, "--json") == 1
    message = json.loads(capsys.readouterr().out)
    assert (message["a"], message["b"], message["regression"]) == (fast, slow, True)
    assert message["rows"][0]["verdict"] == "regression"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tolerance", "abc"], "--tolerance 5%"),
        (["--tolerance", "5"], "a share of at least 0 and under 100 %"),
    ],
)
def test_an_invalid_tolerance_is_an_error(
    arguments: list[str], message: str, fast: str, slow: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("baseline", "compare", fast, slow, *arguments) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out
    assert "Traceback" not in captured.err


def test_another_configuration_is_rejected_until_it_is_allowed(
    fast: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = stored(tmp_path / "other", baseline(config_fingerprint="x", config={"training.batch_size": 9}))
    assert exit_code("baseline", "compare", fast, other) == 1
    assert "--allow-other-config" in capsys.readouterr().err
    assert exit_code("baseline", "compare", fast, other, "--allow-other-config") == 0
    assert "note  the configurations differ" in capsys.readouterr().out


def test_a_missing_baseline_is_an_error(fast: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("baseline", "compare", fast, str(tmp_path / "nothing")) == 1
    assert "gracetune baseline capture CONFIG makes one" in capsys.readouterr().err


def test_a_missing_config_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "baseline"
    assert exit_code("baseline", "capture", str(tmp_path / "no.yaml"), "--output", str(output)) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert not output.exists()
