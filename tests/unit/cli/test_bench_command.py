from __future__ import annotations

import json

import pytest
import torch

from gracetune.cli.bench import print_rows, result_of
from gracetune.cli.console import out
from gracetune.cli.main import main
from gracetune.hardware import probe
from gracetune.memory.trial import Row

ROWS = [
    Row("speed", 55.1, "GB/s", ">= 50", True, "a [detail]"),
    Row("ratio", 0.5, "of it", ">= 0.9", False),
    Row("x", 0, ""),
]


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the answer of a machine without a GPU")
def test_without_a_gpu_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
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
