from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from gracetune.bench.results import result_of
from gracetune.bench.row import BenchRow
from gracetune.bench.step.row import ROW_KEYS
from gracetune.cli.bench import print_rows
from gracetune.cli.console import out
from gracetune.cli.main import main
from gracetune.hardware import probe

ROWS = [
    BenchRow("speed", 55.1, "GB/s", ">= 50", True, "a [detail]"),
    BenchRow("ratio", 0.5, "of it", ">= 0.9", False),
    BenchRow("x", 0, ""),
]


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the answer of a machine without a GPU")
def test_without_a_gpu_the_message_names_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("bench", "memory") == 1
    assert "needs unified memory, which is not available" in capsys.readouterr().err


def test_an_unknown_bench_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("bench", "memroy") == 1
    assert "gracetune bench memory" in capsys.readouterr().err


def test_rows_are_readable_and_results_complete(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(out(), ROWS)
    text = capsys.readouterr().out
    assert "MISS  ratio" in text
    assert "a [detail]" in text
    result = json.loads(json.dumps(result_of("memory", ROWS, probe())))
    assert {"format", "bench", "date", "command", "git_commit", "gpu", "profile", "versions", "machine", "rows"} == set(
        result
    )
    assert result["rows"][1]["ok"] is False


def smoke_row(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The single row of a benchmark on a tiny model."""
    assert exit_code("bench", *arguments, "--smoke", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["rows"]
    assert {*ROW_KEYS} <= {*row}
    assert row["smoke"] is True
    assert len(row["samples_ms"]) >= 20
    assert row["ms_per_step"] == pytest.approx(median(row["samples_ms"]), abs=2e-3)
    assert 0 < row["numerics"]["relative_error"] < 0.05
    assert row["model_flops"] > 0
    assert row["gemm_ceiling_tflops"] > 0
    assert isinstance(row, dict)
    return row


def test_a_step_is_measured_from_end_to_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    row = smoke_row(capsys, "wan14b", "--baseline", "--output", str(file))
    assert row["ratio"] == pytest.approx(row["baseline_ms"] / row["ms_per_step"], rel=1e-3)
    assert row["baseline"].startswith("diffusers + peft")
    assert json.loads(file.read_text())["rows"] == [row]


@pytest.mark.full
def test_lokr_is_measured_against_lycoris(capsys: pytest.CaptureFixture[str]) -> None:
    row = smoke_row(capsys, "wan14b", "--adapter", "lokr", "--baseline", "--optimizer", "automagic", "--frames", "81")
    assert row["baseline"].startswith("diffusers + lycoris-lora")
    assert (row["optimizer"], row["frames"]) == ("automagic", 5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("bench", "adapter"), [("qwen", "lokr"), ("flux", "lora"), ("sdxl", "lora"), ("z-image", "lora")]
)
def test_every_model_is_measured(bench: str, adapter: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = smoke_row(capsys, bench, "--adapter", adapter, "--baseline", "--batch", "2", "--checkpointing", "full")
    assert (row["bench"], row["batch"], row["policy"]) == (bench, 2, "full")


@pytest.mark.full
@pytest.mark.parametrize("adapter", ["loha", "dora"])
def test_every_adapter_is_measured(adapter: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke_row(capsys, "wan14b", "--adapter", adapter, "--baseline")["adapter"] == adapter


@pytest.mark.full
def test_fp8_is_measured_where_it_is_only_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    row = smoke_row(capsys, "wan14b", "--precision", "fp8")
    assert row["numerics"]["relative_error"] > row["numerics"]["library_relative_error"], "three bits of mantissa"


@pytest.mark.full
def test_a_suite_writes_each_row_as_it_comes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "suite.json"
    code = exit_code("bench", "suite", "--smoke", "--only", "automagic", "--only", "lora", "--output", str(file))
    assert code == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == ["lora", "automagic"]
    assert [row["ok"] for row in rows] == [None, None], "a tiny model meets no bar and misses none"
    assert "smoke: a tiny model" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="the answer of a machine without a GPU")
def test_the_real_size_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("bench", "sdxl") == 1
    assert "--smoke" in capsys.readouterr().err


def test_an_invalid_size_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("bench", "wan14b", "--memory-limit", "much") == 1
    assert "--memory-limit" in capsys.readouterr().err
