from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gracetune_simpletuner import memory
from gracetune_simpletuner.memory import Layer
from gracetune_simpletuner.options import OverlayOptions
from gracetune_simpletuner.overlay import Launch, Overlay

from gracetune.config.environment import Environment
from gracetune.config.memory_options import MemoryOptions
from gracetune.errors import MachineError
from gracetune.gh200 import gh200_uvm_enabled, set_uvm_hint_override


class Governed:
    """In place of the layer, which needs a GPU: counts its step boundaries, and gives up at the third."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == 3:
            raise MachineError("nothing left to give up\n  try  a smaller batch")


def overlay(tmp_path: Path, **options: Any) -> Overlay:
    made = Overlay(Environment({}), Launch(), output_dir=tmp_path)
    made.options = OverlayOptions(memory=MemoryOptions(**options))
    return made


def trainer(*, sync: bool) -> Any:
    cls = importlib.import_module("simpletuner.helpers.training.trainer").Trainer
    made = cls.__new__(cls)
    known = {"step": 0, "gradient_accumulation_steps": 1, "device": "cpu", "reduce": None}
    made.config, made.state, made.accelerator = None, {}, SimpleNamespace(sync_gradients=sync, **known)
    return made


def test_the_governor_looks_at_optimizer_steps_and_its_end_is_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requested = overlay(tmp_path, use_uvm=True)
    layer: Any = Layer(requested)
    layer._opened = governed = Governed()
    requested.activate("memory", layer.wrappers())
    trainer(sync=False)._exit_on_signal()
    assert governed.steps == 0
    for _ in range(2):
        trainer(sync=True)._exit_on_signal()
    assert requested.telemetry.of("memory").snapshot() == {"governor_samples": 2}
    with pytest.raises(SystemExit) as ended:
        trainer(sync=True)._exit_on_signal()
    assert ended.value.code == 1
    assert "a smaller batch" in capsys.readouterr().err


def test_an_accelerator_without_what_we_read_ends_the_process_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requested = overlay(tmp_path, use_uvm=True)
    requested.activate("memory", Layer(requested).wrappers())
    moved = trainer(sync=True)
    del moved.accelerator.sync_gradients
    with pytest.raises(SystemExit) as ended:
        moved._exit_on_signal()
    assert ended.value.code == 1
    assert "Accelerator: sync_gradients\n  found     a SimpleNamespace without it" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_layer_says_so_and_upstream_goes_on(tmp_path: Path) -> None:
    requested = overlay(tmp_path, use_uvm=True)
    requested.start_telling()
    layer = memory.activate(requested)
    trainer(sync=True).init_preprocessing_models()
    trainer(sync=True)._exit_on_signal()
    assert layer.heap is None
    assert layer.why_not == "there is no CUDA device"
    assert "there is no CUDA device" in (tmp_path / "gracetune-overlay.jsonl").read_text()


def test_hints_are_given_only_where_they_are_asked_for(tmp_path: Path) -> None:
    memory.activate(overlay(tmp_path, enable_uvm_hints=False))
    assert "set_uvm_hint_override" not in gh200_uvm_enabled().reason
    requested = overlay(tmp_path, enable_uvm_hints=True)
    memory.activate(requested)
    try:
        batch = {"latents": torch.ones(2)}
        assert trainer(sync=True).prepare_batch(batch) is batch
        assert trainer(sync=True).prepare_batch({}) == {}
    finally:
        set_uvm_hint_override(None)
    counts = requested.telemetry.of("placement").snapshot()
    assert counts["batches"] == 1
