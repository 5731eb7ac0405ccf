from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch
from torch import Tensor

from gracetune.config.run_config import Optimizer as Requested
from gracetune.errors import ConfigError
from gracetune.optim.automagic import Automagic
from gracetune.optim.build import (
    build_optimizer,
    load_named_state,
    named_state,
    optimizer_notes,
    parameter_names,
    state_tensors,
)
from gracetune.optim.lion import Lion
from gracetune.optim.named_state import NamedState, StateMismatchError
from gracetune.optim.record import ParamGroup

PRODIGIES = {"prodigy": "prodigyopt", "prodigy_plus_schedule_free": "prodigyplus"}


def settings(name: str = "adamw", **changes: object) -> Requested:
    return Requested.model_validate({"name": name, **changes})


def layers(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"to_q.lora_A.weight": (4, 6), "to_q.lora_B.weight": (6, 4), "to_q.dora_scale": (6,)}
    return {name: torch.nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for name, shape in shapes.items()}


def both() -> list[ParamGroup]:
    return [ParamGroup("high_noise", "high_noise", layers(0)), ParamGroup("low_noise", "low_noise", layers(1))]


def give(groups: list[ParamGroup], seed: int, only: str | None = None) -> None:
    for at, group in enumerate(groups):
        draw = torch.Generator().manual_seed(100 * seed + at)
        for parameter in group.parameters.values():
            gradient = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            parameter.grad = gradient if only in (None, group.name) else None


def need(name: str) -> None:
    if name in PRODIGIES:
        pytest.importorskip(PRODIGIES[name], reason=f"{name} is an optional package")


class TestBuilding:
    def test_each_name_builds_its_optimizer(self) -> None:
        assert type(build_optimizer(settings("adamw"), both())) is torch.optim.AdamW
        assert type(build_optimizer(settings("adafactor"), both())).__module__.startswith("transformers")
        assert type(build_optimizer(settings("lion"), both())) is Lion
        assert type(build_optimizer(settings("automagic"), both())) is Automagic

    @pytest.mark.parametrize("name", PRODIGIES)
    def test_prodigies_where_they_are_installed(self, name: str) -> None:
        need(name)
        groups = both()
        optimizer = build_optimizer(settings(name, lr=1.0), groups)
        before = [parameter.detach().clone() for parameter in parameter_names(groups).values()]
        for step in range(3):
            give(groups, step)
            optimizer.step()
        after = parameter_names(groups).values()
        assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))

    @pytest.mark.parametrize(
        ("name", "package"), [("prodigy", "prodigyopt"), ("prodigy_plus_schedule_free", "prodigy-plus-schedule-free")]
    )
    def test_a_missing_package_is_named(self, name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
        with pytest.raises(ConfigError, match=f"pip install {package}"):
            build_optimizer(settings(name), both())

    def test_adamw_8bit_needs_a_gpu(self) -> None:
        with pytest.raises(ConfigError, match="these are on cpu"):
            build_optimizer(settings("adamw_8bit"), both())

    def test_settings_reach_the_optimizer(self) -> None:
        made = build_optimizer(settings(lr=3e-4, weight_decay=0.05, betas=(0.8, 0.95), eps=1e-6), both())
        for group in made.param_groups:
            assert (group["lr"], group["weight_decay"], group["betas"], group["eps"]) == (3e-4, 0.05, (0.8, 0.95), 1e-6)

    def test_unset_values_are_the_optimizers_defaults(self) -> None:
        own = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).defaults
        made = build_optimizer(settings(), both()).param_groups[0]
        assert all(made[name] == own[name] for name in ("weight_decay", "betas", "eps"))

    def test_adamw_is_fused_where_possible(self) -> None:
        assert build_optimizer(settings(), both()).defaults["fused"] is True
        assert not build_optimizer(settings(options={"foreach": True}), both()).defaults["fused"]
        half = [ParamGroup("", "", layers(dtype=torch.bfloat16))]
        assert not build_optimizer(settings(), half).defaults["fused"]

    def test_groups_keep_name_stage_and_rate(self) -> None:
        groups = [ParamGroup("a", "", layers(0), lr=1e-2), ParamGroup("b", "", layers(1))]
        made = build_optimizer(settings("lion", lr=1e-3), groups).param_groups
        assert [(group["name"], group["lr"]) for group in made] == [("a", 1e-2), ("b", 1e-3)]
        assert made[0]["param_names"][0] == "a/to_q.lora_A.weight"

    def test_empty_and_duplicate_groups_are_errors(self) -> None:
        with pytest.raises(ValueError, match="nothing to train"):
            build_optimizer(settings(), [])
        with pytest.raises(ValueError, match="one name"):
            build_optimizer(settings(), [ParamGroup("a", "", layers()), ParamGroup("a", "", layers())])

    def test_names_of_one_group_without_a_name_are_plain(self) -> None:
        assert [*parameter_names([ParamGroup("", "", layers())])] == [*layers()]


class TestOptions:
    def test_options_reach_the_optimizer(self) -> None:
        assert build_optimizer(settings(options={"amsgrad": True}), both()).defaults["amsgrad"] is True
        assert build_optimizer(settings("automagic", options={"beta2": 0.9}), both()).defaults["beta2"] == 0.9

    @pytest.mark.parametrize(
        ("name", "option", "near"),
        [
            ("adamw", "amsgrid", "amsgrad"),
            ("automagic", "clip_treshold", "clip_threshold"),
            ("lion", "decoupled_decay", "decoupled_weight_decay"),
            ("adafactor", "clip_treshold", "clip_threshold"),
        ],
    )
    def test_misspelt_ones_are_rejected_with_the_nearest(self, name: str, option: str, near: str) -> None:
        with pytest.raises(ConfigError) as caught:
            build_optimizer(settings(name, options={option: 1}), both())
        (problem,) = caught.value.problems
        assert problem.key == f"optimizer.options.{option}"
        assert problem.hint == f"write `{near}`"

    def test_all_problems_come_at_once(self) -> None:
        with pytest.raises(ConfigError) as caught:
            build_optimizer(settings("lion", eps=1e-8, options={"nonsense": 1, "lr": 2}), both())
        keys = [problem.key for problem in caught.value.problems]
        assert keys == ["optimizer.eps", "optimizer.options.nonsense", "optimizer.options.lr"]

    def test_given_twice_is_rejected(self) -> None:
        with pytest.raises(ConfigError, match="one of the two"):
            build_optimizer(settings(weight_decay=0.1, options={"weight_decay": 0.2}), both())

    def test_limits_belong_into_their_own_section(self) -> None:
        with pytest.raises(ConfigError, match=r"optimizer\.limits\.max_lr"):
            build_optimizer(settings("automagic", options={"max_lr": 1e-2}), both())

    def test_values_the_optimizer_rejects_are_our_error(self) -> None:
        with pytest.raises(ConfigError, match="change what `optimizer` says"):
            build_optimizer(settings("automagic", options={"beta2": 2.0}), both())
        with pytest.raises(ConfigError, match="adafactor"):
            build_optimizer(settings("adafactor", options={"warmup_init": True}), both())

    def test_options_without_effect_are_accepted_with_a_note(self) -> None:
        config = settings("adafactor", options={"stochastic_rounding": True})
        build_optimizer(config, both())
        assert "fp32" in optimizer_notes(config)[0]
        with pytest.raises(ConfigError, match="stochastic_rounding"):
            build_optimizer(config, [ParamGroup("", "", layers(dtype=torch.bfloat16))])


class TestAdafactor:
    def test_takes_the_configs_rate(self) -> None:
        group = build_optimizer(settings("adafactor", lr=1e-3, eps=1e-20), both()).param_groups[0]
        assert (group["lr"], group["relative_step"], group["scale_parameter"]) == (1e-3, False, False)
        assert group["eps"] == (1e-20, 1e-3)

    def test_uses_its_own_rate_with_relative_step(self) -> None:
        config = settings("adafactor", options={"relative_step": True, "scale_parameter": True, "eps": [1e-30, 1e-3]})
        groups = both()
        optimizer = build_optimizer(config, groups)
        before = next(iter(groups[0].parameters.values())).detach().clone()
        give(groups, 0)
        optimizer.step()
        assert not torch.equal(before, next(iter(groups[0].parameters.values())))
        assert optimizer.param_groups[0]["lr"] == 1.0
        assert "relative_step" in optimizer_notes(config)[0]


class TestAutomagicLimits:
    def limits(self, **changes: object) -> list[tuple[float, float, float]]:
        groups = build_optimizer(settings("automagic", **changes), both()).param_groups
        return [(group["lr_bump"], group["min_lr"], group["max_lr"]) for group in groups]

    def test_unset_limits_are_the_published_ones(self) -> None:
        assert self.limits() == [(1e-6, 1e-7, 1e-3)] * 2

    def test_shared_limits_reach_both_experts(self) -> None:
        assert self.limits(limits={"max_lr": 1e-4}) == [(1e-6, 1e-7, 1e-4)] * 2

    def test_limits_of_one_expert_need_no_shared_limits(self) -> None:
        found = self.limits(high_noise={"lr_bump": 5e-6, "max_lr": 2e-3}, low_noise={"min_lr": 5e-7})
        assert found == [(5e-6, 1e-7, 2e-3), (1e-6, 5e-7, 1e-3)]

    def test_limits_of_one_expert_override_shared_ones(self) -> None:
        found = self.limits(limits={"max_lr": 1e-4, "lr_bump": 2e-6}, low_noise={"max_lr": 5e-4})
        assert found == [(2e-6, 1e-7, 1e-4), (2e-6, 1e-7, 5e-4)]

    def test_contradicting_limits_are_rejected(self) -> None:
        with pytest.raises(ConfigError, match=r"optimizer\.high_noise"):
            self.limits(limits={"min_lr": 1e-4}, high_noise={"max_lr": 1e-5})

    def test_limits_of_an_untrained_expert_get_a_note(self) -> None:
        config = settings("automagic", lr=1e-6, high_noise={"max_lr": 1e-4})
        (note,) = optimizer_notes(config, both()[1:])
        assert note == "optimizer.high_noise: not used, that expert is not trained"
        assert optimizer_notes(config, both()) == ()

    def test_a_start_outside_the_limits_gets_a_note(self) -> None:
        (note,) = optimizer_notes(settings("automagic", lr=1e-2), [ParamGroup("", "", layers())])
        assert "rates start at 0.001" in note


def test_a_low_rate_for_prodigy_gets_a_note() -> None:
    assert "1 is usual" in optimizer_notes(settings("prodigy", lr=1e-4))[0]
    assert optimizer_notes(settings("prodigy", lr=1.0)) == ()


CASES: list[tuple[str, dict[str, Any]]] = [
    ("adamw", {"options": {"amsgrad": True}}),
    ("adamw", {"options": {"foreach": True}}),
    ("adafactor", {"options": {"beta1": 0.9}}),
    ("torch_adafactor", {"weight_decay": 0.1}),
    ("lion", {"weight_decay": 0.1}),
    ("automagic", {"low_noise": {"max_lr": 1e-2}, "lr": 1e-3, "weight_decay": 0.1}),
    ("automagic", {"lr": 1e-3, "options": {"rates": "upstream"}}),
    ("prodigy", {"lr": 1.0}),
    ("prodigy_plus_schedule_free", {"lr": 1.0}),
    ("prodigy_plus_schedule_free", {"lr": 1.0, "options": {"split_groups": False, "factored": False}}),
]


class Travelling(torch.optim.Optimizer):
    """Keeps state in param groups, as Prodigy does, which is not installed in tests."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        numerator = torch.tensor(3.0, dtype=torch.float64)
        self.param_groups[0].update(distance=2.5, averaging=True, seen=(1, 2.0), numerator=numerator)


class TestState:
    @pytest.mark.parametrize(("name", "changes"), CASES, ids=[f"{name}-{at}" for at, (name, _) in enumerate(CASES)])
    def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(self, name: str, changes: dict[str, Any]) -> None:
        """Experts alternate, and the run is interrupted between two turns of one expert."""
        need(name)

        def turn(groups: list[ParamGroup], optimizer: torch.optim.Optimizer, step: int) -> None:
            give(groups, step, only="high_noise" if step // 2 % 2 == 0 else "low_noise")
            optimizer.step()

        config = settings(name, **changes)
        whole = both()
        optimizer = build_optimizer(config, whole)
        for step in range(9):
            turn(whole, optimizer, step)
        first = both()
        optimizer = build_optimizer(config, first)
        for step in range(5):
            turn(first, optimizer, step)
        saved = named_state(optimizer, parameter_names(first))
        saved = NamedState(
            {key: t.cpu().clone() for key, t in saved.tensors.items()}, json.loads(json.dumps(saved.json))
        )
        again = both()
        for old, new in zip(parameter_names(first).values(), parameter_names(again).values(), strict=True):
            new.data.copy_(old.data)
        resumed = build_optimizer(config, again)
        load_named_state(resumed, parameter_names(again), saved)
        for step in range(5, 9):
            turn(again, resumed, step)
        for one, two in zip(parameter_names(whole).values(), parameter_names(again).values(), strict=True):
            assert torch.equal(one, two)

    @pytest.mark.parametrize("name", ["adamw", "automagic"])
    def test_state_of_other_parameters_is_rejected(self, name: str) -> None:
        groups = both()
        optimizer = build_optimizer(settings(name), groups)
        give(groups, 0)
        optimizer.step()
        saved = named_state(optimizer, parameter_names(groups))
        one = [ParamGroup("low_noise", "low_noise", layers())]
        target = build_optimizer(settings(name), one)
        with pytest.raises(StateMismatchError, match=r"unexpected \(\d+\): high_noise/to_q"):
            load_named_state(target, parameter_names(one), saved)
        assert not target.state

    def test_state_of_another_optimizer_is_rejected(self) -> None:
        groups = both()
        saved = named_state(build_optimizer(settings("lion"), groups), parameter_names(groups))
        with pytest.raises(StateMismatchError, match="the state of 'Lion', not of 'AdamW'"):
            load_named_state(build_optimizer(settings("adamw"), groups), parameter_names(groups), saved)

    def test_an_expert_never_gets_the_state_of_the_other(self) -> None:
        groups = both()
        optimizer = build_optimizer(settings("adamw"), groups)
        give(groups, 0, only="low_noise")
        optimizer.step()
        saved = named_state(optimizer, parameter_names(groups))
        swapped = build_optimizer(settings("adamw"), groups[::-1])
        names = parameter_names(groups)
        with pytest.raises(StateMismatchError, match="groups"):
            load_named_state(swapped, names, saved)
        again = build_optimizer(settings("adamw"), groups)
        load_named_state(again, names, saved)
        held = {name for name, parameter in names.items() if again.state.get(parameter)}
        assert held == {name for name in names if name.startswith("low_noise/")}

    def test_values_computed_in_param_groups_are_saved(self) -> None:
        """Such as Prodigy's distance, in every number type. Values that the config decides are not restored."""
        parameters = {"weight": torch.nn.Parameter(torch.ones(2))}
        first = Travelling([("weight", parameters["weight"])], lr=1.0)
        parameters["weight"].grad = torch.ones(2)
        first.step()
        saved = named_state(first, parameters)
        saved = NamedState(saved.tensors, json.loads(json.dumps(saved.json)))
        again = Travelling([("weight", parameters["weight"])], lr=0.5)
        load_named_state(again, parameters, saved)
        group = again.param_groups[0]
        assert (group["distance"], group["averaging"], group["seen"], group["lr"]) == (2.5, True, (1, 2.0), 0.5)
        assert torch.equal(group["numerator"], torch.tensor(3.0, dtype=torch.float64))

    def test_a_changed_rate_takes_effect_after_a_resume(self) -> None:
        groups = both()
        optimizer = build_optimizer(settings("adamw", lr=1e-3), groups)
        give(groups, 0)
        optimizer.step()
        saved = named_state(optimizer, parameter_names(groups))
        other = build_optimizer(settings("adamw", lr=1e-5), groups)
        load_named_state(other, parameter_names(groups), saved)
        assert other.param_groups[0]["lr"] == 1e-5


@pytest.mark.parametrize("name", ["adamw", "automagic", "lion"])
def test_the_predicted_state_size_is_the_real_one(name: str) -> None:
    groups = both()
    optimizer = build_optimizer(settings(name), groups)
    give(groups, 0)
    optimizer.step()
    saved = named_state(optimizer, parameter_names(groups)).tensors
    assert sum(one.numel() for one in state_tensors(optimizer)) == sum(one.numel() for one in saved.values()) > 0
