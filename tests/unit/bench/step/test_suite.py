from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any, cast

import pytest
import torch

from gracetune.bench.step.measurement import Bench
from gracetune.bench.step.row import ROW_KEYS, StepRow, TargetBar
from gracetune.bench.step.suite import WAN14B, choose_tasks, measure_tasks, with_verdict
from gracetune.errors import ConfigError, GracetuneError

ROW = StepRow(
    bench="wan14b", adapter="lora", precision="bf16", batch=1, resolution=1024, frames=1, checkpointing="auto",
    ms_per_step=460.0, tokens_per_s=1.0, tflops=1.0, gemm_ceiling_tflops=1.0, peak_gib=60.0, estimated_peak_gib=61.0,
    compile_s=1.0, baseline_ms=1000.0, ratio=2.17, samples_ms=(460.0,) * 20, smoke=False, gpu="a GPU", git_commit=None,
    command="", versions={},
)  # fmt: skip


def test_rows_begin_with_the_promised_columns() -> None:
    assert tuple(one.name for one in fields(StepRow))[: len(ROW_KEYS)] == ROW_KEYS
    assert set(ROW_KEYS) <= set(asdict(ROW))


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ({}, True),
        ({"ms_per_step": 470.5}, False),
        ({"ratio": 2.09}, False),
        ({"estimated_peak_gib": 67.0}, False),
        ({"estimated_peak_gib": None}, True),
        ({"memory_limit_gib": 45.0}, False),
        ({"memory_limit_gib": 45.0, "peak_gib": 44.9, "estimated_peak_gib": 44.0}, True),
        ({"smoke": True, "ms_per_step": 9999.0}, None),
    ],
)
def test_a_bar_is_missed_by_any_of_its_parts(change: dict[str, object], ok: bool | None) -> None:
    assert with_verdict(replace(ROW, **change), WAN14B["lora"].bar, {}).ok is ok  # type: ignore[arg-type]


def test_a_row_may_be_held_against_another() -> None:
    bar = WAN14B["automagic"].bar
    alone = replace(ROW, peak_gib=None)
    assert with_verdict(alone, bar, {}).ok is None
    assert with_verdict(replace(alone, ms_per_step=469.0), bar, {"lora": ROW}).ok is True
    assert with_verdict(replace(alone, ms_per_step=470.0), bar, {"lora": ROW}).ok is False


def test_a_bar_reads_as_it_was_promised() -> None:
    assert WAN14B["lokr"].bar.words() == "<= 560 ms, >= 3x"
    assert TargetBar(max_slowdown=0.02, than="lora").words() == "<= +2% against lora"


def test_rows_are_chosen_by_name() -> None:
    assert [*choose_tasks(())] == [*WAN14B]
    assert [*choose_tasks(["video", "lokr"])] == ["lokr", "video"]
    with pytest.raises(ConfigError) as caught:
        choose_tasks(["lokrr"])
    assert caught.value.problems[0].hint == "--only lokr"


class Failing:
    """A bench one of whose rows does not fit."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.lines: list[str] = []

    def report(self, text: str) -> None:
        self.lines.append(text)

    def row(self, job: Any, name: str) -> StepRow:
        if name == "lora-45gib":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return replace(ROW, name=name)


def test_a_row_that_fails_costs_no_other_row_and_is_an_error_in_the_end() -> None:
    bench = Failing()
    rows = measure_tasks(cast(Bench, bench), ["lora", "lora-45gib", "lokr"])
    assert [next(rows).name, next(rows).name] == ["lora", "lokr"]
    with pytest.raises(GracetuneError, match=r"^not measured: lora-45gib: CUDA out of memory\.$"):
        next(rows)
    assert any("Traceback" in text for text in bench.lines)
