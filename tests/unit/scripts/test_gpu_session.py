"""scripts/gpu_session.sh without a GPU: its usage every day, a step in its smoke form where there is time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def session(*given: str, seconds: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_session.sh"), *given],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={**os.environ, "PYTHON": sys.executable, **variables},
    )


@pytest.mark.parametrize("given", [(), ("tests",), ("nothing", "OUT"), ("tests steps", "OUT")])
def test_a_step_it_does_not_have_is_answered_with_those_it_has(given: tuple[str, ...], tmp_path: Path) -> None:
    done = session(*(str(tmp_path / "out") if one == "OUT" else one for one in given))
    assert done.returncode == 2
    assert (
        "tests, forms, steps, others, video, families, whole, flux, switch, pace, parts, learning, blocks or full"
        in done.stderr
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_step_writes_its_rows_and_no_folder_of_the_machine(tmp_path: Path) -> None:
    done = session("others", str(tmp_path), seconds=280, SMOKE="1", COMMIT="abc", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "exit 0" in done.stdout
    text = (tmp_path / "steps-others-h200.json").read_text()
    assert str(tmp_path) not in text
    assert str(ROOT) not in text
    assert [row["name"] for row in json.loads(text)["rows"]] == ["lokr", "lora-fp8"]
    assert (tmp_path / "others.log").stat().st_size > 0


@pytest.mark.full
def test_streamed_and_resident_full_fine_tunes_end_with_the_same_weights(tmp_path: Path) -> None:
    done = session("full", str(tmp_path), SMOKE="1", seconds=180)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "full-finetune-h200.json").read_text())["rows"]}
    assert [rows[f"{name}_tensors_that_differ"]["ok"] for name in ("2b_streamed", "5b_streamed")] == [True, True]


@pytest.mark.full
def test_the_experts_switch_is_timed_for_both_ways_of_keeping_them(tmp_path: Path) -> None:
    done = session("switch", str(tmp_path), SMOKE="1")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "expert-switch-h200.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["resident", "streamed"]
    assert "behind the last backward pass" in rows[1]["detail"]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_whole_runs_are_equal_to_their_plain_twins_as_far_as_a_cpu_can_show(tmp_path: Path) -> None:
    done = session("whole", str(tmp_path), seconds=880, SMOKE="1")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "whole-runs-h200.json").read_text()
    assert str(tmp_path) not in text
    result = json.loads(text)
    assert [row["name"] for row in result["rows"] if row["ok"] is False] == []
    assert [*result["scenarios"]] == ["caches", "experts", "overflow"]
    assert result["scenarios"]["caches"]["counters"]["cache.latents.hits"] > 0


@pytest.mark.full
def test_stock_gradients_of_flux_are_compared_kernel_by_kernel(tmp_path: Path) -> None:
    done = session("flux", str(tmp_path), seconds=280, SMOKE="1")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "flux-gradients-h200.json").read_text())["rows"]
    assert {"flux_default", "flux_math", "attention_math_slice"} <= {row["name"] for row in rows}
    assert all(row["ok"] for row in rows), rows
