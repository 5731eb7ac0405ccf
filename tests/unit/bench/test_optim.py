from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from gracetune.bench.optim import OptimBenchSizes, lora_shapes, rows
from gracetune.cli.bench import BENCHES
from gracetune.hardware import probe


def test_shapes_are_those_of_a_lora_and_as_many_as_asked() -> None:
    shapes = [*lora_shapes(100_000_000)]
    total = sum(rows * columns for rows, columns in shapes)
    assert 100_000_000 <= total < 100_000_000 + 16 * 13824
    assert {min(shape) for shape in shapes} == {16}
    assert all((one[0] == 16) != (two[0] == 16) for one, two in pairwise(shapes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the figures of a machine without a GPU")
def test_on_a_cpu_there_is_a_figure_without_a_bar() -> None:
    (row,) = rows(torch.device("cpu"), OptimBenchSizes(200_000, rounds=2, warmup=1))
    assert row.name == "automagic_over_adamw"
    assert (row.bar, row.ok) == ("", None)
    assert row.value > 0
    assert "fused AdamW" in row.detail


def test_the_command_knows_it() -> None:
    assert callable(BENCHES["optim"])
    assert probe().gpus is not None
