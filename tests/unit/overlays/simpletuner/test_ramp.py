from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from gracetune_simpletuner import ramp
from gracetune_simpletuner.options import OverlayOptions
from gracetune_simpletuner.overlay import Launch, Overlay
from gracetune_simpletuner.ramp import micro_batches_of, samples_of, steps_in
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.environment import Environment
from gracetune.config.run_config import BatchRamp
from gracetune.errors import ConfigError
from gracetune.optim.batch_ramp import Ramp

MICRO = 2


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """A real one, on the CPU."""
    yield Accelerator(cpu=True)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def config(**more: Any) -> SimpleNamespace:
    known = {"train_batch_size": MICRO, "gradient_accumulation_steps": 1, "max_train_steps": 6, "num_train_epochs": 0}
    return SimpleNamespace(**(known | {"total_num_batches": 6} | more))


def attached(tmp_path: Path, first: int, last: int, steps: int, settings: Any, launch: Launch | None = None) -> Overlay:
    sizes = {"initial_effective_batch_size": first, "target_effective_batch_size": last, "batch_rampup_steps": steps}
    overlay = Overlay(Environment({}), launch or Launch(), output_dir=tmp_path)
    overlay.options = OverlayOptions(ramp=BatchRamp(enabled=True, **sizes))
    ramp.activate(overlay, settings)
    return overlay


@pytest.fixture
def undone() -> Iterator[list[Overlay]]:
    """accelerate is not imported afresh for every test."""
    overlays: list[Overlay] = []
    yield overlays
    for overlay in overlays:
        overlay.installer.undo()


class Loop:
    """Upstream's loop around a model with one weight: what each optimizer step had for a gradient, and its length."""

    def __init__(self, accelerator: Accelerator, settings: Any, global_step: int = 0) -> None:
        from simpletuner.helpers.training.trainer import Trainer  # type: ignore[import-not-found]

        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.trainer = Trainer.__new__(Trainer)
        self.trainer.config, self.trainer.accelerator = settings, accelerator
        self.trainer.state, self.trainer.parameters = {"global_step": global_step}, [self.weight]
        self.accelerator = accelerator
        self.gradients: list[float] = []
        self.lengths: list[int] = []
        self._length = 0

    def run(self, batches: list[list[float] | None]) -> None:
        """None: a batch is prepared and not trained on, as an evaluation does."""
        for values in batches:
            batch = self.trainer.prepare_batch({"latents": torch.tensor(values or [9.0] * 7)})
            if values is None:
                self.trainer.prepare_batch({"latents": torch.tensor([1.0])})
                continue
            with self.accelerator.accumulate():
                self.accelerator.backward((batch["latents"] * self.weight).mean())
                self._length += 1
                if self.accelerator.sync_gradients:
                    assert self.weight.grad is not None
                    self.gradients.append(float(self.weight.grad))
                    self.lengths.append(self._length)
                    self.weight.grad, self._length = None, 0
                    self.trainer.state["global_step"] += 1


def test_windows_have_the_length_they_opened_with_and_weigh_all_samples_alike(
    tmp_path: Path, accelerator: Accelerator, undone: list[Overlay]
) -> None:
    settings = config()
    undone.append(attached(tmp_path, 2, 8, 8, settings))
    loop = Loop(accelerator, settings)
    values = [[float(i), float(i * i)] for i in range(13)]
    values[5], values[7] = [3.0], [8.0]  # short batches at the end of a bucket
    loop.run(values)  # type: ignore[arg-type]
    assert loop.lengths == [1, 1, 1, 1, 2, 3, 4]
    start = 0
    for length, gradient in zip(loop.lengths, loop.gradients, strict=True):
        samples = [value for batch in values[start : start + length] for value in batch]
        assert gradient == pytest.approx(sum(samples) / len(samples), rel=1e-6)
        start += length
    counts = undone[0].telemetry.of("ramp").snapshot()
    assert counts == {"windows": 7, "micro_batches": 13, "windows_with_uneven_batches": 2}
    assert settings.gradient_accumulation_steps == 4


def test_a_level_ramp_is_upstreams_own_accumulation(
    tmp_path: Path, accelerator: Accelerator, undone: list[Overlay]
) -> None:
    values = [[0.1 * i, 0.3 * i] for i in range(6)]
    accelerator.gradient_accumulation_steps = 2
    plain = Loop(accelerator, config(gradient_accumulation_steps=2))
    plain.run(values)  # type: ignore[arg-type]
    accelerator.step = 0
    settings = config()
    undone.append(attached(tmp_path, 4, 4, 8, settings))
    ramped = Loop(accelerator, settings)
    ramped.run(values)  # type: ignore[arg-type]
    assert ramped.gradients == plain.gradients


def test_a_batch_that_is_only_evaluated_is_no_part_of_a_window(
    tmp_path: Path, accelerator: Accelerator, undone: list[Overlay]
) -> None:
    settings = config()
    undone.append(attached(tmp_path, 4, 4, 8, settings))
    loop = Loop(accelerator, settings)
    loop.run([[1.0, 3.0], None, [5.0, 7.0]])
    assert (loop.lengths, loop.gradients) == ([2], [4.0])


def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path, accelerator: Accelerator, undone: list[Overlay]) -> None:
    settings = config()
    undone.append(attached(tmp_path, 2, 8, 8, settings))
    loop = Loop(accelerator, settings, global_step=5)
    loop.run([[1.0, 1.0]] * 7)
    assert loop.lengths == [3, 4]


def test_several_backward_passes_of_one_micro_batch_add_up(
    tmp_path: Path, accelerator: Accelerator, undone: list[Overlay]
) -> None:
    settings = config()
    undone.append(attached(tmp_path, 2, 2, 1, settings))
    loop = Loop(accelerator, settings)
    batch = loop.trainer.prepare_batch({"latents": torch.tensor([6.0])})
    with accelerator.accumulate():
        for _ in range(3):
            accelerator.backward((batch["latents"] * loop.weight).mean())
    assert float(loop.weight.grad) == pytest.approx(18.0)  # type: ignore[arg-type]


def test_steps_and_epochs_come_from_the_ramp(tmp_path: Path, undone: list[Overlay]) -> None:
    from simpletuner.helpers.training.trainer import Trainer

    trainer = Trainer.__new__(Trainer)
    trainer.config = config(max_train_steps=0, num_train_epochs=3)
    undone.append(attached(tmp_path, 2, 8, 8, trainer.config))
    trainer._recalculate_training_steps()
    assert trainer.config.max_train_steps == 8  # 1 1 1 1 2 3 4 4 of 18 micro-batches; the next would need 4 more
    undone.pop().installer.undo()
    trainer.config = config(max_train_steps=8, num_train_epochs=0)
    undone.append(attached(tmp_path, 2, 8, 8, trainer.config))
    trainer._recalculate_training_steps()
    assert (trainer.config.max_train_steps, trainer.config.num_train_epochs) == (8, 3)


@pytest.mark.parametrize(
    ("settings", "launch", "message"),
    [
        (config(train_batch_size=32), Launch(), "at least 32"),
        (config(), Launch(count=4), "at least 8"),
        (config(optimizer_release_gradients=True), Launch(), "optimizer_release_gradients"),
        (config(deepspeed_config="zero.json"), Launch(), "no DeepSpeed with a ramp"),
    ],
)
def test_what_cannot_be_ramped_from_outside_is_rejected(
    tmp_path: Path, settings: Any, launch: Launch, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        attached(tmp_path, 4, 32, 8, settings, launch)


@given(st.integers(1, 8), st.integers(0, 60), st.integers(0, 100), st.integers(0, 40))
def test_steps_and_micro_batches_are_each_others_inverse(first: int, more: int, length: int, steps: int) -> None:
    grown = Ramp(first * MICRO, (first + more) * MICRO, length, MICRO)
    assert steps_in(grown, micro_batches_of(grown, steps)) == max(1, steps)
    assert micro_batches_of(grown, steps) >= steps * first


def test_a_batch_tells_its_samples() -> None:
    assert samples_of({"latents": torch.zeros(3, 4)}) == 3
    assert samples_of({"input_ids": torch.zeros(2, 4)}) == 2
    assert samples_of({"latents": None}) is None
    assert samples_of([1]) is None


def test_a_config_without_the_batches_of_an_epoch_ends_the_process(
    tmp_path: Path,
    accelerator: Accelerator,
    undone: list[Overlay],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Upstream would catch an AttributeError of ours, and train for the wrong number of steps."""
    settings = config()
    loop = Loop(accelerator, settings)
    monkeypatch.setattr(type(loop.trainer), "_recalculate_training_steps", lambda trainer: None)
    undone.append(attached(tmp_path, 2, 8, 8, settings))
    del settings.total_num_batches
    with pytest.raises(SystemExit) as ended:
        loop.trainer._recalculate_training_steps()
    assert ended.value.code == 1
    assert "config.steps: total_num_batches, overrode_max_train_steps" in capsys.readouterr().err
