"""A peer's config moves the weights as the peer's optimizer does: 500 steps of a small problem, and how gradients of
several micro-batches become one step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gracetune.config.run_config import RunConfig
from gracetune.optim.automagic import Automagic
from gracetune.optim.build import build_optimizer
from gracetune.optim.record import ParamGroup
from gracetune.train.gradients import FlatGradients, GradientClipping, gradient_factor
from unit.config import aitoolkit_jobs, simpletuner_files
from unit.fidelity.peers import aitoolkit_config, case_name, recorded, simpletuner_config

SCRIPTS = Path(__file__).parents[3] / "scripts" / "peer_vectors"
sys.path.insert(0, str(SCRIPTS))
import problem  # noqa: E402 (the same problem that the peers were recorded on)

sys.path.remove(str(SCRIPTS))

OTHERWISE = ("prodigy", "adamw_bf16")
"""Compared by tests of their own: an optional package, and one whose state is in bf16."""
SIMPLETUNER = [case for case in recorded("simpletuner", "optimizers") if case["options"]["optimizer"] not in OTHERWISE]
AITOOLKIT = [case for case in recorded("aitoolkit", "optimizers") if "steps" in case]
RATES = next(case for case in recorded("aitoolkit", "optimizers") if "mean_rates" in case)


def path_of(config: RunConfig) -> dict[str, list[list[float]]]:
    parameters = problem.start()
    group = ParamGroup("", "", dict(zip(("matrix", "vector"), parameters, strict=True)))
    return problem.follow(parameters, build_optimizer(config.optimizer, [group]).step)


def assert_same_path(ours: dict[str, list[list[float]]], case: dict[str, Any]) -> None:
    for name, values in ours.items():
        for step, current, existing in zip(case["steps"], values, case[name], strict=True):
            assert current == pytest.approx(existing, rel=1e-4, abs=2e-6), f"{name} at step {step}"


@pytest.mark.parametrize("case", SIMPLETUNER, ids=case_name)
def test_the_path_of_a_simpletuner_config(case: dict[str, Any], tmp_path: Path) -> None:
    assert_same_path(path_of(simpletuner_config(tmp_path, case["options"])), case)


def test_adamw_bf16_goes_the_same_way_a_little_less_far(tmp_path: Path) -> None:
    """SimpleTuner's second moment, in bf16, stops growing early, so that its steps are 5 % longer; a note says that we
    keep weights and state in fp32."""
    case = next(one for one in recorded("simpletuner", "optimizers") if one["options"]["optimizer"] == "adamw_bf16")
    ours = torch.tensor(path_of(simpletuner_config(tmp_path, case["options"]))["matrix"][-1])
    theirs, begun = torch.tensor(case["matrix"][-1]), problem.start()[0].detach().flatten()
    current, existing = ours - begun, theirs - begun
    assert float(existing.norm() / current.norm()) == pytest.approx(1.05, abs=0.02)
    assert float(torch.nn.functional.cosine_similarity(current, existing, dim=0)) > 0.995


@pytest.mark.parametrize("case", AITOOLKIT, ids=case_name)
def test_the_path_of_an_ai_toolkit_job(case: dict[str, Any], tmp_path: Path) -> None:
    config = aitoolkit_config(tmp_path, case["train"])
    if config.optimizer.name == "automagic":  # a note names the difference, and how to train as ai-toolkit does
        optimizer = config.optimizer.model_copy(update={"options": {"rates": "upstream"}})
        config = config.model_copy(update={"optimizer": optimizer})
    assert_same_path(path_of(config), case)


def mean_rates(kind: str) -> list[float]:
    """As `aitoolkit_optimizers.py` records them: of the last update, before they are stored."""
    draw = torch.Generator().manual_seed(21)
    weight = nn.Parameter(torch.zeros(64, 32))
    steady = torch.randn(64, 32, generator=draw)
    optimizer = Automagic([weight], lr=RATES["train"]["lr"], rates=kind)  # type: ignore[arg-type]
    found = []
    for step in range(1, max(RATES["rate_steps"]) + 1):
        weight.grad = 0.01 * (0.5 * steady + torch.randn(64, 32, generator=draw))
        optimizer.step()
        if step in RATES["rate_steps"]:
            found.append(float(optimizer.learning_rates()["0"]))
    return found


@pytest.mark.full
def test_the_note_about_automagic_has_the_right_figures(tmp_path: Path) -> None:
    exact, upstream, theirs = mean_rates("exact"), mean_rates("upstream"), RATES["mean_rates"]
    assert upstream == pytest.approx(theirs, rel=0.03)
    at = [RATES["rate_steps"].index(step) for step in (500, 2000)]
    assert [round(exact[one] / theirs[one]) for one in at] == [4, 6]
    resolved = aitoolkit_jobs.read(tmp_path, train={"optimizer": "automagic"})
    (stated,) = [note for note in resolved.notes if "Automagic" in note]
    assert "4 times as high here at step 500, and 6 times at step 2,000" in stated
    assert "--set optimizer.options.rates=upstream" in stated


def test_simpletuners_prodigy_has_a_rate_of_one(tmp_path: Path) -> None:
    case = next(one for one in recorded("simpletuner", "optimizers") if one["options"]["optimizer"] == "prodigy")
    config = simpletuner_config(tmp_path, case["options"])
    given, theirs = config.optimizer, case["settings"]
    assert (given.lr, given.weight_decay, given.eps) == tuple(
        float(theirs[key]) for key in ("lr", "weight_decay", "eps")
    )
    assert str(given.betas) == theirs["betas"]
    assert config.training.max_grad_norm is None, "SimpleTuner does not clip with Prodigy"
    assert any("learning_rate: not used" in note for note in simpletuner_files.resolve(tmp_path, case["options"]).notes)


# -- several micro-batches ---------------------------------------------------------------------------------------------


def steps_of(config: RunConfig, gradients: list[list[float]]) -> list[list[float]]:
    """The gradient of each optimizer step, as a training loop makes it of micro-batches of one sample."""
    training, weight = config.training, nn.Parameter(torch.zeros(2))
    flat, found = FlatGradients({"weight": weight}), []
    each = training.gradient_accumulation_steps
    for first in range(0, len(gradients), each):
        flat.open()
        for gradient in gradients[first : first + each]:
            (weight * torch.tensor(gradient)).sum().backward()
            flat.collect()
        factor = gradient_factor(training.accumulation, micro_batches=each, samples=each)
        flat.finish(factor, GradientClipping(training.grad_clip, training.max_grad_norm))
        assert weight.grad is not None
        found.append(weight.grad.tolist())
    return found


ACCUMULATION = recorded("aitoolkit", "accumulation")
LEGACY = next(case for case in ACCUMULATION if "gradient_accumulation_steps" in case["train"])


@pytest.mark.parametrize("case", [case for case in ACCUMULATION if case is not LEGACY], ids=case_name)
def test_gradients_of_micro_batches_become_ai_toolkits_step(case: dict[str, Any], tmp_path: Path) -> None:
    config = aitoolkit_config(tmp_path, case["train"], "wan22_14b")
    ours = steps_of(config, case["gradients"])
    assert ours == [pytest.approx(step, rel=1e-4) for step in case["steps"]]


def test_the_older_key_learns_from_every_micro_batch_and_says_so(tmp_path: Path) -> None:
    each = LEGACY["train"]["gradient_accumulation_steps"]
    last = LEGACY["gradients"][each - 1 :: each]
    assert LEGACY["steps"] == [pytest.approx(one) for one in last], "upstream has been repaired: do as it does"
    ours = steps_of(aitoolkit_config(tmp_path, LEGACY["train"]), LEGACY["gradients"])
    groups = [LEGACY["gradients"][first : first + each] for first in range(0, len(LEGACY["gradients"]), each)]
    means = [[sum(column) / each for column in zip(*group, strict=True)] for group in groups]
    assert ours == [pytest.approx(mean, rel=1e-5) for mean in means]
    resolved = aitoolkit_jobs.read(tmp_path, train=LEGACY["train"])
    assert any("forgets the gradients of all but the last" in note for note in resolved.notes)


@pytest.mark.parametrize(
    "case", [case for case in ACCUMULATION if "switch_boundary_every" in case["train"]], ids=case_name
)
def test_turns_of_experts_are_counted_in_optimizer_steps(case: dict[str, Any], tmp_path: Path) -> None:
    """Where ai-toolkit switches within an optimizer step, a note says what is done instead."""
    train = case["train"]
    each, every = train["gradient_accumulation"], train["switch_boundary_every"]
    resolved = aitoolkit_jobs.read(tmp_path, train=train)
    stated = any("also within an optimizer step" in note for note in resolved.notes)
    turns = case["experts"]
    mixed = any(len(set(turns[first : first + each])) > 1 for first in range(0, len(turns), each))
    assert stated == mixed
    if not mixed:
        assert resolved.config.model.switch_experts_every * each == every
