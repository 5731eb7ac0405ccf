from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gracetune.optim import automagic_stack
from gracetune.optim.automagic import Automagic
from gracetune.optim.element_rates import RateLimits
from gracetune.optim.named_state import NamedState, StateMismatchError
from unit.optim.automagic_reference import Reference

SHAPES = [(16, 5), (16, 5), (5, 16), (7,), (3, 4, 2, 3), (16, 5), (), (7,)]


def made(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]


def named(parameters: list[Tensor], prefix: str = "layer") -> list[tuple[str, Tensor]]:
    return [(f"{prefix}.{at}", parameter) for at, parameter in enumerate(parameters)]


def give(parameters: list[Tensor], seed: int, leave_out: set[int] = frozenset()) -> list[Tensor | None]:  # type: ignore[assignment]
    draw = torch.Generator().manual_seed(seed)
    for at, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=draw) * 10.0 ** (at % 4 - 2)
        parameter.grad = None if at in leave_out else gradient.to(parameter.dtype)
    return [parameter.grad for parameter in parameters]


class TestAgainstTheReference:
    @settings(max_examples=25)
    @given(
        st.lists(st.sampled_from(SHAPES), min_size=1, max_size=6),
        st.integers(0, 1000),
        st.sampled_from([RateLimits(), RateLimits(1e-4, 1e-3, 1e-2), RateLimits(3e-8, 1e-7, 1e-2)]),
        st.sampled_from([0.0, 0.3]),
        st.lists(st.sets(st.integers(0, 5), max_size=3), min_size=1, max_size=6),
        st.integers(1, 200),
    )
    def test_every_step_is_equal(
        self,
        shapes: list[tuple[int, ...]],
        seed: int,
        limits: RateLimits,
        decay: float,
        left_out: list[set[int]],
        chunk: int,
    ) -> None:
        """For any mix of shapes, any chunk size, and with some gradients missing."""
        parameters = made(shapes, seed=seed)
        lr = 2e-3
        plain = [Reference(p.detach().clone(), lr, limits, weight_decay=decay) for p in parameters]
        options = {"lr_bump": limits.lr_bump, "min_lr": limits.min_lr, "max_lr": limits.max_lr}
        optimizer = Automagic(named(parameters), lr=lr, weight_decay=decay, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(automagic_stack, "_CHUNKS", {"cpu": chunk})
            for number, missing in enumerate(left_out):
                for reference, gradient in zip(plain, give(parameters, seed + number, missing), strict=True):
                    if gradient is not None:
                        reference.step(gradient)
                optimizer.step()
        for parameter, reference in zip(parameters, plain, strict=True):
            torch.testing.assert_close(parameter.detach(), reference.parameter, rtol=2e-5, atol=2e-6)
        state = optimizer.named_state().tensors
        for (name, _), reference in zip(named(parameters), plain, strict=True):
            expected = torch.full_like(reference.rates, 2.0) if reference.last is None else reference.last.double()
            assert torch.equal(state[f"{name}:sign"].double(), expected)

    def test_rates_stay_equal_for_hundreds_of_steps(self) -> None:
        parameters = made([(12, 9)])
        reference = Reference(parameters[0].detach().clone(), 1e-4, RateLimits(1e-5, 1e-6, 5e-4))
        optimizer = Automagic(named(parameters), lr=1e-4, lr_bump=1e-5, min_lr=1e-6, max_lr=5e-4)
        for number in range(300):
            (gradient,) = give(parameters, number)
            assert gradient is not None
            gradient[:6] = gradient[:6].abs()  # half of the signs always agree: those rates reach the maximum
            reference.step(gradient)
            optimizer.step()
        _, rule, stack = optimizer._stacks[0]
        found = rule.grid.read(stack.rates[0]).double()
        torch.testing.assert_close(found, reference.rates, rtol=1e-6, atol=1.01 * rule.grid.unit)
        assert bool((found[:6] == torch.tensor(5e-4, dtype=torch.float32).double()).all())
        torch.testing.assert_close(parameters[0].detach(), reference.parameter, rtol=1e-3, atol=1e-5)

    def test_bf16_parameters_are_updated_in_float32(self) -> None:
        parameters = made([(6, 6), (6, 6), (5,)], torch.bfloat16)
        limits = RateLimits(1e-2, 1e-2, 1e-1)
        plain = [Reference(p.detach().clone(), 5e-2, limits) for p in parameters]
        optimizer = Automagic(named(parameters), lr=5e-2, lr_bump=1e-2, min_lr=1e-2, max_lr=1e-1)
        for number in range(5):
            for reference, gradient in zip(plain, give(parameters, number), strict=True):
                assert gradient is not None
                reference.step(gradient)
            optimizer.step()
        for parameter, reference in zip(parameters, plain, strict=True):
            assert parameter.dtype == torch.bfloat16
            torch.testing.assert_close(parameter.detach(), reference.parameter, rtol=1e-2, atol=1e-2)
        assert all(t.dtype == torch.float32 for k, t in optimizer.named_state().tensors.items() if k.endswith("row"))


def rates_of(optimizer: Automagic) -> list[set[float]]:
    """The rates of each stack."""
    return [set(rule.grid.read(stack.rates).flatten().tolist()) for _group, rule, stack in optimizer._stacks]


def float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


class TestRates:
    def test_a_thousand_agreeing_steps_reach_the_top_and_stay(self) -> None:
        parameters = made([(4, 4)])
        optimizer = Automagic(named(parameters))
        parameters[0].grad = torch.ones(4, 4)
        for _ in range(1001):
            optimizer.step()
        assert rates_of(optimizer) == [{float32(1e-3)}]

    def test_disagreeing_steps_reach_the_bottom(self) -> None:
        parameters = made([(4, 4)])
        optimizer = Automagic(named(parameters), lr=1e-5)
        for number in range(20):
            parameters[0].grad = torch.ones(4, 4) * (-1) ** number
            optimizer.step()
        assert rates_of(optimizer) == [{float32(1e-7)}]

    def test_each_group_has_its_own_limits(self) -> None:
        high, low = made([(4, 4), (4, 4)])
        optimizer = Automagic(
            [
                {"params": [("a", high)], "name": "high_noise", "lr_bump": 1e-4, "max_lr": 1e-2},
                {"params": [("b", low)], "name": "low_noise", "max_lr": 2e-5},
            ]
        )
        for _ in range(200):
            high.grad, low.grad = torch.ones(4, 4), torch.ones(4, 4)
            optimizer.step()
        assert rates_of(optimizer) == [{float32(1e-2)}, {float32(2e-5)}]
        means = {name: float(rate) for name, rate in optimizer.learning_rates().items()}
        assert means == {"high_noise": pytest.approx(1e-2), "low_noise": pytest.approx(2e-5)}

    def test_lr_0_trains_nothing(self) -> None:
        parameters = made([(4, 4), (3,)])
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer = Automagic(named(parameters), lr=0.0)
        for number in range(5):
            give(parameters, number)
            optimizer.step()
        assert all(torch.equal(a, b.detach()) for a, b in zip(before, parameters, strict=True))

    def test_training_reduces_the_loss(self) -> None:
        goal = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        guess = torch.zeros(8, 8, requires_grad=True)
        optimizer = Automagic([("x", guess)], lr=1e-3, lr_bump=1e-4, max_lr=1e-1)
        losses = []
        for _ in range(200):
            optimizer.zero_grad()
            loss = (guess - goal).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.01 * losses[0]


class TestEdges:
    def test_zero_rows_and_huge_gradients_give_finite_values(self) -> None:
        parameters = made([(4, 4), (4,)])
        optimizer = Automagic(named(parameters))
        for _ in range(3):
            parameters[0].grad = torch.zeros(4, 4)
            parameters[0].grad[0] = 1e12
            parameters[1].grad = torch.tensor([0.0, 1e15, -1e-20, 0.0])
            optimizer.step()
        assert all(bool(parameter.isfinite().all()) for parameter in parameters)

    def test_all_zero_gradients_move_nothing(self) -> None:
        parameters = made([(4, 4), (4,)])
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer = Automagic(named(parameters))
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert all(torch.equal(a, b.detach()) for a, b in zip(before, parameters, strict=True))

    @pytest.mark.parametrize("changes", [{"beta2": 1.0}, {"eps": 0.0}, {"clip_threshold": 0.0}, {"weight_decay": -1.0}])
    def test_invalid_options_are_rejected(self, changes: dict[str, float]) -> None:
        with pytest.raises(ValueError, match="beta2"):
            Automagic(named(made([(2, 2)])), **changes)  # type: ignore[arg-type]

    def test_unknown_rates_kind_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="exact or upstream"):
            Automagic(named(made([(2, 2)])), rates="int8")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="exact rates only"):
            Automagic(named(made([(2, 2)])), rates="upstream", fused=True)

    def test_a_skipped_step_leaves_8_bit_rates_unchanged(self) -> None:
        parameters = made([(4, 4), (4,)])
        optimizer = Automagic(named(parameters), rates="upstream")
        give(parameters, 1)
        optimizer.step()
        before = optimizer.named_state().tensors
        optimizer.found_inf = torch.ones(())
        give(parameters, 2)
        optimizer.step()
        after = optimizer.named_state().tensors
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items())

    def test_eps_may_be_a_pair(self) -> None:
        assert Automagic(named(made([(2, 2)])), eps=(1e-20, 1e-3)).param_groups[0]["eps"] == 1e-20

    def test_fused_is_rejected_where_it_cannot_run(self) -> None:
        with pytest.raises(ValueError, match="CUDA"):
            Automagic(named(made([(2, 2)])), fused=True)

    def test_a_closure_is_called_with_gradients(self) -> None:
        (parameter,) = made([(2, 2)])
        optimizer = Automagic([("x", parameter)])

        def closure() -> float:
            loss = parameter.square().sum()
            loss.backward()
            return float(loss.detach())

        assert optimizer.step(closure) == pytest.approx(float(parameter.detach().square().sum()), rel=1e-3)


def trained(steps: range, shapes: list[tuple[int, ...]], optimizer: Automagic | None = None) -> Any:
    parameters = made(shapes)
    optimizer = optimizer or Automagic(named(parameters), lr=1e-4)
    for number in steps:
        give(parameters, number)
        optimizer.step()
    return parameters, optimizer


class TestState:
    SHAPES = ((16, 5), (16, 5), (7,), (3, 4, 2, 3), ())

    def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(self) -> None:
        shapes = list(self.SHAPES)
        whole, _ = trained(range(8), shapes)
        first, optimizer = trained(range(5), shapes)
        saved = optimizer.named_state()
        again = [parameter.detach().clone().requires_grad_() for parameter in first]
        # In another order: state is matched by name, not by position.
        resumed = Automagic(named(again)[::-1], lr=1e-4)
        resumed.load_named_state(saved)
        for number in range(5, 8):
            give(again, number)
            resumed.step()
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))

    @pytest.mark.parametrize(("saved", "loaded"), [("exact", "upstream"), ("upstream", "exact")])
    def test_rates_convert_between_8_bits_and_exact(self, saved: Any, loaded: Any) -> None:
        parameters = made([(6, 4), (3,)])
        optimizer = Automagic(named(parameters), lr=1e-5, rates=saved)
        for number in range(4):
            give(parameters, number)
            optimizer.step()
        other = Automagic(named(parameters), rates=loaded)
        other.load_named_state(optimizer.named_state())
        means = [next(iter(one.learning_rates().values())) for one in (optimizer, other)]
        assert float(means[1]) == pytest.approx(float(means[0]), rel=0.02)

    def test_saved_state_is_a_copy(self) -> None:
        parameters, optimizer = trained(range(3), [(4, 4)])
        saved = optimizer.named_state()
        kept = {key: tensor.clone() for key, tensor in saved.tensors.items()}
        give(parameters, 9)
        optimizer.step()
        assert all(torch.equal(kept[key], tensor) for key, tensor in saved.tensors.items())
        assert any(not torch.equal(kept[key], now) for key, now in optimizer.named_state().tensors.items())

    def test_rates_are_converted_to_other_limits(self) -> None:
        _, optimizer = trained(range(30), [(16, 5)])
        saved = optimizer.named_state()
        for bump, top in ((1e-5, 1e-3), (1e-9, 1e-3), (1e-6, 2e-3)):
            other = Automagic(named(made([(16, 5)])), lr_bump=bump, max_lr=top)
            other.load_named_state(saved)
            found, before = other.learning_rates()["0"], optimizer.learning_rates()["0"]
            torch.testing.assert_close(found, before, rtol=1e-2, atol=0)

    def test_other_parameters_are_rejected_with_lists(self) -> None:
        _, optimizer = trained(range(2), [(4, 4), (3,)])
        saved = optimizer.named_state()
        target = Automagic([("layer.0", made([(4, 4)])[0]), ("other", made([(3,)])[0])])
        before = target.named_state()
        with pytest.raises(StateMismatchError) as caught:
            target.load_named_state(saved)
        assert "missing (3): other:rate" in str(caught.value)
        assert "unexpected (3): layer.1:rate" in str(caught.value)
        assert all(torch.equal(before.tensors[key], now) for key, now in target.named_state().tensors.items())
        with pytest.raises(StateMismatchError, match="different"):
            Automagic(named(made([(4, 5), (3,)]))).load_named_state(saved)

    def test_another_optimizers_state_is_rejected(self) -> None:
        with pytest.raises(StateMismatchError, match="'AdamW'"):
            Automagic(named(made([(4, 4)]))).load_named_state(NamedState({}, {"optimizer": "AdamW"}))

    def test_saving_needs_parameter_names(self) -> None:
        with pytest.raises(ValueError, match="without parameter names"):
            Automagic(made([(4, 4)])).named_state()

    def test_torchs_own_state_dict_round_trips_the_options(self) -> None:
        """accelerate saves and loads it once in `prepare`."""
        parameters, optimizer = trained(range(3), [(4, 4)])
        saved = optimizer.state_dict()
        assert saved["state"] == {}
        torch.save(saved, io.BytesIO())
        kept = optimizer.named_state()
        optimizer.load_state_dict(saved)
        assert all(torch.equal(kept.tensors[key], now) for key, now in optimizer.named_state().tensors.items())
        give(parameters, 5)
        optimizer.step()
        assert optimizer.learning_rates()["0"] > 0
        with pytest.raises(ValueError, match="load_named_state"):
            optimizer.load_state_dict({"state": {0: {}}, "param_groups": saved["param_groups"]})
