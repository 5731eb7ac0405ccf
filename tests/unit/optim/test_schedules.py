from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from diffusers.optimization import get_scheduler
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config import Environment, load
from gracetune.config.run_config import Schedule
from gracetune.errors import ConfigError
from gracetune.optim.schedules import build_schedule, effective_schedule, learning_rate, move_to

NAMES = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "sine")
FALLING = ("linear", "cosine", "polynomial", "cosine_with_restarts")


def schedule(name: str = "constant", **changes: object) -> Schedule:
    return Schedule.model_validate({"name": name, **changes})


def optimizer(*rates: float) -> torch.optim.SGD:
    return torch.optim.SGD(
        [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates], lr=rates[0]
    )


def followed(config: Schedule, total: int, *rates: float, name: str = "adamw") -> list[list[float]]:
    """The rate of each group at every step of a run, read from the optimizer."""
    sgd = optimizer(*rates)
    scheduler = build_schedule(sgd, config, optimizer_name=name, total=total).scheduler
    seen: list[list[float]] = [[] for _ in rates]
    for _ in range(total):
        for group, rates_seen in zip(sgd.param_groups, seen, strict=True):
            rates_seen.append(group["lr"])
        sgd.step()
        scheduler.step()
    return seen


class TestAgainstDiffusers:
    @pytest.mark.parametrize("warmup", [0, 7])
    @pytest.mark.parametrize(
        ("name", "theirs"),
        [
            ("constant", {"name": "constant"}),
            ("constant_with_warmup", {"name": "constant_with_warmup"}),
            ("linear", {"name": "linear"}),
            ("cosine", {"name": "cosine", "num_cycles": 0.5}),
            ("cosine_with_restarts", {"name": "cosine_with_restarts", "num_cycles": 3}),
            ("polynomial", {"name": "polynomial", "power": 2.0}),
        ],
    )
    def test_every_step_is_equal(self, name: str, theirs: dict[str, object], warmup: int) -> None:
        end = 1e-7 if name == "polynomial" else 0.0  # the only one that diffusers has
        cycles = 3 if name == "cosine_with_restarts" else 1
        power = 2.0 if name == "polynomial" else 1.0
        config = schedule(name, warmup_steps=warmup, cycles=cycles, power=power, end_lr=end)
        sgd = optimizer(2e-4)
        options = {"num_warmup_steps": warmup, "num_training_steps": 50, **theirs}
        scheduler = get_scheduler(optimizer=sgd, **options)  # type: ignore[arg-type]
        expected = []
        for _ in range(50):
            expected.append(sgd.param_groups[0]["lr"])
            sgd.step()
            scheduler.step()
        assert followed(config, 50, 2e-4)[0] == pytest.approx(expected, rel=1e-9, abs=1e-18)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, int]:
    total = draw(st.integers(1, 400))
    config = schedule(
        draw(st.sampled_from(NAMES)),
        warmup_steps=draw(st.integers(0, total - 1)),
        cycles=draw(st.sampled_from([0.5, 1, 1.5, 3])),
        power=draw(st.floats(0.1, 4)),
        end_lr=draw(st.floats(0, 1e-4)),
    )
    return config, total


class TestRates:
    @given(schedules())
    def test_stay_between_0_and_the_groups_rate(self, made: tuple[Schedule, int]) -> None:
        config, total = made
        for step in range(total + 20):
            rate = learning_rate(step, total, config, 1e-3)
            warming = config.name != "constant" and step < config.warmup_steps
            assert (0 if warming else min(config.end_lr, 1e-3)) * (1 - 1e-9) <= rate <= 1e-3 * (1 + 1e-9)

    @given(schedules())
    def test_warm_up_is_a_straight_line_that_ends_at_the_rate(self, made: tuple[Schedule, int]) -> None:
        config, total = made
        if config.name == "constant":
            assert learning_rate(0, total, config, 1e-3) == 1e-3
            return
        for step in range(config.warmup_steps + 1):
            expected = 1e-3 * step / max(1, config.warmup_steps) if step < config.warmup_steps else 1e-3
            assert learning_rate(step, total, config, 1e-3) == pytest.approx(expected)

    @pytest.mark.parametrize("name", FALLING)
    def test_reach_end_lr_and_stay_there(self, name: str) -> None:
        config = schedule(name, end_lr=1e-6, warmup_steps=10)
        assert learning_rate(100, 100, config, 1e-3) == pytest.approx(1e-6)
        assert learning_rate(1000, 100, config, 1e-3) == pytest.approx(1e-6)
        assert learning_rate(99, 100, config, 1e-3) > 1e-6

    def test_restarts_jump_back_to_the_top(self) -> None:
        config = schedule("cosine_with_restarts", cycles=4)
        rates = [learning_rate(step, 100, config, 1.0) for step in range(100)]
        jumps = [at for at in range(1, 100) if rates[at] > rates[at - 1]]
        assert jumps == [25, 50, 75]
        assert [rates[at] for at in jumps] == [1.0, 1.0, 1.0]

    def test_sine_is_a_wave_from_the_top(self) -> None:
        config = schedule("sine", cycles=2, end_lr=0.2)
        rates = [learning_rate(step, 100, config, 1.0) for step in range(101)]
        assert [rates[at] for at in (0, 25, 50, 75, 100)] == pytest.approx([1.0, 0.2, 1.0, 0.2, 1.0])
        assert max(abs(b - a) for a, b in pairwise(rates)) < 0.06

    def test_steps_count_from_0(self) -> None:
        with pytest.raises(ValueError, match="from 0"):
            learning_rate(-1, 10, schedule(), 1.0)


class TestBuilding:
    def test_every_group_keeps_its_own_rate(self) -> None:
        first, second, none = followed(schedule("linear", end_lr=1e-5), 10, 1e-3, 1e-4, 0.0)
        assert (first[0], second[0]) == (1e-3, 1e-4)
        assert first[5] == pytest.approx(1e-5 + (1e-3 - 1e-5) / 2)
        assert second[5] == pytest.approx(1e-5 + (1e-4 - 1e-5) / 2)
        assert none == [0.0] * 10

    @pytest.mark.parametrize("name", ["automagic", "prodigy_plus_schedule_free"])
    def test_optimizers_with_their_own_rate_stay_constant_with_a_note(self, name: str) -> None:
        config = schedule("cosine", warmup_steps=3)
        assert followed(config, 10, 1e-3, name=name) == [[1e-3] * 10]
        (note,) = build_schedule(optimizer(1e-3), config, optimizer_name=name, total=10).notes
        assert "cosine" in note
        assert name in note
        assert effective_schedule(schedule(), name) == (schedule(), ())

    @pytest.mark.parametrize(
        ("config", "word"),
        [
            (schedule("constant", warmup_steps=5), "constant_with_warmup"),
            (schedule("cosine", cycles=3), "schedule.cycles"),
            (schedule("linear", power=2.0), "schedule.power"),
        ],
    )
    def test_settings_without_effect_get_a_note(self, config: Schedule, word: str) -> None:
        (note,) = effective_schedule(config, "adamw")[1]
        assert word in note

    def test_an_end_above_the_rate_is_rejected(self) -> None:
        config = schedule("polynomial", end_lr=1e-2)
        with pytest.raises(ConfigError) as caught:
            build_schedule(optimizer(1e-3), config, optimizer_name="adamw", total=10)
        assert [problem.key for problem in caught.value.problems] == ["schedule.end_lr"]

    @pytest.mark.parametrize("name", ["constant_with_warmup", *FALLING])
    def test_a_warm_up_longer_than_the_run_is_followed_with_a_note(self, name: str) -> None:
        config = schedule(name, warmup_steps=50)
        assert followed(config, 5, 1e-3)[0] == pytest.approx([0, 2e-5, 4e-5, 6e-5, 8e-5])
        (note,) = build_schedule(optimizer(1e-3), config, optimizer_name="adamw", total=5).notes
        assert "rises to 0.08 of optimizer.lr" in note
        assert build_schedule(optimizer(1e-3), config, optimizer_name="adamw", total=51).notes == ()

    def test_resumes_at_the_saved_step(self) -> None:
        config = schedule("cosine", warmup_steps=3)
        whole = followed(config, 20, 1e-3)[0]
        sgd = optimizer(1e-3)
        scheduler = build_schedule(sgd, config, optimizer_name="adamw", total=20).scheduler
        for _ in range(8):
            sgd.step()
            scheduler.step()
        saved = scheduler.state_dict()
        again = optimizer(1e-3)
        resumed = build_schedule(again, config, optimizer_name="adamw", total=20).scheduler
        resumed.load_state_dict(saved)
        again.step()
        resumed.step()
        assert again.param_groups[0]["lr"] == whole[9]

    @pytest.mark.parametrize("steps", [0, 2, 8])
    def test_moves_to_a_number_of_steps(self, steps: int) -> None:
        """Forwards or backwards: the next optimizer step and all later ones have their own rates."""
        config = schedule("cosine", warmup_steps=3)
        whole = followed(config, 20, 1e-3)[0]
        sgd = optimizer(1e-3)
        scheduler = build_schedule(sgd, config, optimizer_name="adamw", total=20).scheduler
        for _ in range(5):
            sgd.step()
            scheduler.step()
        move_to(scheduler, steps)
        assert scheduler.last_epoch == steps
        for step in range(steps, steps + 3):
            assert sgd.param_groups[0]["lr"] == whole[step]
            sgd.step()
            scheduler.step()


@pytest.mark.parametrize(("warmup", "stated"), [(0, "whole waves"), (40, "is a wave in SimpleTuner, and here too")])
def test_a_simpletuner_config_gets_a_note_about_sine(tmp_path: Path, warmup: int, stated: str) -> None:
    example = Path(__file__).parents[3] / "examples" / "gh200_large_batch.json"
    config = {**json.loads(example.read_text()), "lr_scheduler": "sine", "lr_warmup_steps": warmup}
    (tmp_path / "c.json").write_text(json.dumps(config))
    resolved = load(tmp_path / "c.json", environment=Environment({}))
    assert any("lr_scheduler" in note and stated in note for note in resolved.notes)
    assert resolved.config.schedule.half_period == (warmup or None)


class TestWaves:
    def test_waves_take_half_a_period_from_top_to_bottom(self) -> None:
        config = schedule("cosine", half_period=10, end_lr=1e-4)
        rates = [learning_rate(step, 40, config, 1e-3) for step in range(41)]
        assert rates[0] == rates[20] == rates[40] == 1e-3
        assert rates[10] == rates[30] == pytest.approx(1e-4)
        sine = [learning_rate(step, 40, schedule("sine", half_period=10), 1e-3) for step in range(16)]
        assert (sine[0], sine[5], sine[15]) == (pytest.approx(5e-4), pytest.approx(1e-3), pytest.approx(0, abs=1e-12))

    def test_waves_have_no_warm_up_and_other_schedules_no_half_period(self) -> None:
        _, notes = effective_schedule(schedule("cosine", half_period=10, warmup_steps=5, cycles=2), "adamw")
        assert len(notes) == 2
        assert "schedule.warmup_steps" in notes[0]
        assert "cosine with `half_period` has none" in notes[1]
        _, notes = effective_schedule(schedule("linear", half_period=10), "adamw")
        assert notes == ("schedule.half_period: linear has none; cosine and sine do",)
        build_schedule(
            optimizer(1e-3), schedule("cosine", half_period=3, warmup_steps=50), optimizer_name="adamw", total=5
        )
