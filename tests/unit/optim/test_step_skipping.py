"""A step skipped on the device leaves no trace, for every optimizer."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gracetune.adapters.state import ExpertStage
from gracetune.config.run_config import Optimizer as Requested
from gracetune.optim.averages import EmaWeights
from gracetune.optim.build import build_optimizer, named_state, parameter_names
from gracetune.optim.record import ParamGroup
from gracetune.optim.step_skipping import can_skip_on_device, move_towards, step_unless, waiting_note
from gracetune.train.gradients import FlatGradients, GradientClipping

NAMES = ("adamw", "adafactor", "lion", "automagic", "prodigy", "prodigy_plus_schedule_free")
OPTIONAL = {"prodigy": "prodigyopt", "prodigy_plus_schedule_free": "prodigyplus"}
EXPERTS: tuple[ExpertStage, ...] = ("high_noise", "low_noise")
SHAPES = ((6, 4), (6, 4), (5,), (3, 2, 2, 2))


class Trained:
    """Two experts of a few small tensors, an optimizer with weight decay, and an average."""

    def __init__(self, name: str) -> None:
        draw = torch.Generator().manual_seed(0)

        def tensors() -> dict[str, nn.Parameter]:
            return {f"t{at}": nn.Parameter(torch.randn(shape, generator=draw)) for at, shape in enumerate(SHAPES)}

        self.groups = [ParamGroup(expert, expert, tensors()) for expert in EXPERTS]
        config: dict[str, Any] = {"name": name, "lr": 1e-2, "weight_decay": 0.1}
        self.optimizer = build_optimizer(Requested.model_validate(config), self.groups)
        self.named: Any = parameter_names(self.groups)
        self.ema = EmaWeights(self.named, decay=0.9)

    def step(self, number: int, *, nan: bool = False) -> None:
        group: Any = self.groups[number % 2].parameters
        gradients = FlatGradients(group)
        gradients.open()
        draw = torch.Generator().manual_seed(100 + number)
        for parameter in group.values():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        if nan:
            group["t1"].grad[0, 0] = float("nan")
        bad = (~gradients.finish(1.0, GradientClipping()).isfinite()).float()
        step_unless(self.optimizer, bad)
        self.ema.update(bad)
        gradients.close()

    def state(self) -> dict[str, Tensor]:
        kept = named_state(self.optimizer, self.named)
        values = {f"value {name}": parameter.detach().clone() for name, parameter in self.named.items()}
        averages = {f"average {name}": average.clone() for name, average in self.ema.averages.items()}
        return {**values, **averages, **kept.tensors}


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    assert not [name for name in one if not torch.equal(one[name], two[name])]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_step_without_finite_gradients_leaves_no_trace(name: str, first: int) -> None:
    """Also the first one, before there is any state. Later steps continue as if it had not happened."""
    if name in OPTIONAL and importlib.util.find_spec(OPTIONAL[name]) is None:
        pytest.skip(f"{OPTIONAL[name]} is not installed")
    met, never = Trained(name), Trained(name)
    for number in range(first):
        met.step(number)
        never.step(number)
    before = met.state()
    met.step(first, nan=True)
    after = met.state()
    assert_same({key: after[key] for key in before}, before)
    for number in range(first, first + 4):
        met.step(number)
        never.step(number)
    assert_same(met.state(), never.state())
    moved = met.state()
    assert any(not torch.equal(moved[key], before[key]) for key in before)


def test_which_optimizers_skip_on_the_device_and_which_make_the_host_wait() -> None:
    can = {name: can_skip_on_device(Trained(name).optimizer) for name in ("adamw", "adafactor", "lion", "automagic")}
    assert can == {"adamw": True, "adafactor": False, "lion": True, "automagic": True}
    waited = waiting_note(Trained("adafactor").optimizer, "optimizer adafactor", torch.device("cuda"))
    assert waited is not None
    assert "waits" in waited
    assert waiting_note(Trained("adafactor").optimizer, "x", torch.device("cpu")) is None
    assert waiting_note(Trained("lion").optimizer, "x", torch.device("cuda")) is None


def test_many_tensors_are_averaged_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gracetune.optim.step_skipping._CHUNK", 5)
    held = [torch.zeros(size) for size in (3, 4, 1, 0, 2)]
    goals = [torch.ones(len(tensor), dtype=torch.bfloat16) for tensor in held]
    move_towards(held, goals, 0.25)
    move_towards(held, goals, torch.tensor(0.0))
    assert all(bool((tensor == 0.25).all()) for tensor in held)
