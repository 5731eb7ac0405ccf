"""A peer's config averages its weights and changes its learning rate as the peer does, over a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.config.run_config import Ema as EmaConfig
from gracetune.config.run_config import RunConfig
from gracetune.optim.averages import EmaWeights
from gracetune.optim.schedules import build_schedule
from unit.config import aitoolkit_jobs, simpletuner_files
from unit.fidelity.peers import aitoolkit_config, case_name, recorded, simpletuner_config

PATH = 2000
"""Steps of the path that is averaged: the value at step s is s / 2000."""
SIMPLETUNER_RATES = [
    case for case in recorded("simpletuner", "schedules") if case["options"]["lr_scheduler"] != "cosine_with_restarts"
]


def averages(config: EmaConfig, steps: list[int]) -> list[float]:
    value = torch.zeros(1)
    ema = EmaWeights.from_config({"value": value}, config)
    assert ema is not None
    found = {}
    for step in range(1, PATH + 1):
        value.fill_(step / PATH)
        ema.update()
        if step in steps:
            found[step] = float(ema.averages["value"])
    return [found[step] for step in steps]


@pytest.mark.parametrize("case", recorded("simpletuner", "ema"), ids=case_name)
def test_averages_of_a_simpletuner_config(case: dict[str, Any], tmp_path: Path) -> None:
    config = simpletuner_config(tmp_path, {"use_ema": True, **case["options"]})
    assert averages(config.training.ema, case["steps"]) == pytest.approx(case["averages"], rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("case", recorded("aitoolkit", "ema"), ids=case_name)
def test_averages_of_an_ai_toolkit_job(case: dict[str, Any], tmp_path: Path) -> None:
    config = aitoolkit_config(tmp_path, {"ema_config": case["ema_config"]})
    assert averages(config.training.ema, case["steps"]) == pytest.approx(case["averages"], rel=1e-5)


def rates(config: RunConfig) -> list[float]:
    """Of every optimizer step of a run."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.optimizer.lr)
    total = config.training.max_steps
    assert total is not None
    scheduler = build_schedule(optimizer, config.schedule, optimizer_name=config.optimizer.name, total=total).scheduler
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("case", SIMPLETUNER_RATES, ids=case_name)
def test_learning_rates_of_a_simpletuner_config(case: dict[str, Any], tmp_path: Path) -> None:
    """SimpleTuner cuts the rates of its waves to whole 1e-9."""
    config = simpletuner_config(tmp_path, case["options"])
    assert rates(config) == pytest.approx(case["rates"], rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("case", recorded("aitoolkit", "schedules"), ids=case_name)
def test_learning_rates_of_an_ai_toolkit_job(case: dict[str, Any], tmp_path: Path) -> None:
    assert rates(aitoolkit_config(tmp_path, case["train"])) == pytest.approx(case["rates"], rel=1e-5, abs=1e-12)


def test_a_schedule_that_simpletuner_does_not_follow_is_named(tmp_path: Path) -> None:
    case = next(one for one in recorded("simpletuner", "schedules") if one not in SIMPLETUNER_RATES)
    assert set(case["rates"]) == {case["options"]["learning_rate"]}, "SimpleTuner's restarts have become what they say"
    resolved = simpletuner_files.resolve(tmp_path, case["options"])
    assert any("SimpleTuner 4.10 warns that its own misbehaves" in note for note in resolved.notes)


def test_an_average_in_half_precision_is_named(tmp_path: Path) -> None:
    resolved = simpletuner_files.resolve(tmp_path, {"use_ema": True})
    assert any("kept in fp32 here" in note for note in resolved.notes)
    assert not any("fp32 here" in note for note in aitoolkit_jobs.read(tmp_path).notes)
