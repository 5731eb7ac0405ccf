"""Whole runs of a tiny dual-expert Wan on a real GPU, in float32 and without compiling unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import gracetune.train.loop
from gracetune.config.run_config import RunConfig
from gracetune.memory.native import Uvm
from gracetune.models.experts import ParkingChoice, Way
from gracetune.telemetry.events import HeldOutLoss, MemorySampled
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.train.blocks import Preparation, prepare_blocks
from gracetune.train.demo_wan import demo_config
from gracetune.train.view import CollectingView
from runs.made_runs import TinyModel, config_for, images, run
from runs.test_bad_input import assert_same_states
from runs.test_resume import DUAL_EXPERT, STEPS, Interrupting, assert_same_end, losses
from runs.test_self_proof import Absent

pytestmark = pytest.mark.gpu

PLAIN: dict[str, Any] = {"compile": "off", "attention": "math"}
"""torch's other kernels for float32 have no deterministic backward pass."""
QUIET: dict[str, Any] = {"every_steps": 1, "trackers": []}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def dual(root: Path, tiny_model: TinyModel, **sections: Any) -> RunConfig:
    given = {**DUAL_EXPERT, "logging": QUIET, **sections}
    given["training"] = {**DUAL_EXPERT["training"], **PLAIN, **sections.get("training", {})}
    return config_for("wan", tiny_model, root, **given)


@pytest.mark.parametrize("at", [3, 4])
def test_a_resumed_run_ends_bit_for_bit_as_one_that_was_not_interrupted(
    at: int, tiny_model: TinyModel, tmp_path: Path
) -> None:
    whole, parted = (dual(tmp_path / name, tiny_model) for name in ("whole", "parted"))
    assert run(whole).step == STEPS
    assert run(parted, Interrupting(at)).step == at
    assert run(parted).step == STEPS
    assert losses(parted) == losses(whole)
    assert_same_end(whole, parted)


def test_the_held_out_loss_falls_as_in_the_demo(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("wan", "t2v-14b-2.2")
    config = demo_config(tmp_path / "out", model, images(tmp_path / "seen", 8), images(tmp_path / "new", 3), seed=1)
    training = config.training.model_copy(update=PLAIN)
    validation = config.validation.model_copy(update={"prompts": (), "enabled": False})
    quiet = config.logging.model_copy(update={"trackers": ()})
    run(config.model_copy(update={"training": training, "validation": validation, "logging": quiet}))
    records = read_log(tmp_path / "out" / "logs" / "events.jsonl").merged()
    means: dict[str, list[float]] = {}
    for event in (record.event for record in records):
        if isinstance(event, HeldOutLoss):
            means.setdefault(event.stage, []).append(event.mean)
    assert means.keys() == {"high_noise", "low_noise"}
    for stage, found in means.items():
        assert found[-1] < 0.8 * found[0], stage


@pytest.mark.parametrize("way", ["pinned_copy", "managed"])
def test_parked_experts_learn_what_resident_ones_learn(
    way: Way, uvm: Uvm, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"enable_uvm_hints": True}
    one, two = (dual(tmp_path / name, tiny_model, memory=memory) for name in ("resident", "parked"))
    run(one)
    # A plan parks what does not fit, and these fit; everything after that decision is real.
    choice = ParkingChoice(way, "for the test")
    monkeypatch.setattr("gracetune.train.assembly.choose_parking", lambda *_, **__: choice)
    heard = CollectingView()
    run(two, heard)
    assert "for the test" in heard.lines
    assert losses(one) == losses(two)
    assert_same_end(one, two)


def test_unified_memory_changes_no_loss(uvm: Uvm, tiny_model: TinyModel, tmp_path: Path) -> None:
    plain = dual(tmp_path / "plain", tiny_model)
    caches = {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"}
    unified = dual(tmp_path / "unified", tiny_model, cache=caches, memory={"use_uvm": True})
    before = uvm.total_stats().live_bytes
    run(plain)
    heard = CollectingView()
    run(unified, heard)
    assert losses(plain) == losses(unified)
    assert_same_end(plain, unified)
    records = read_log(Path(unified.output_dir) / "logs" / "events.jsonl").merged()
    counters = [record.event.counters for record in records if isinstance(record.event, MemorySampled)][-1]
    assert counters["uvm.arena_reserved_bytes"] > 0, heard.lines
    assert counters["uvm.stage"] == 1
    assert uvm.total_stats().live_bytes == before, "everything managed was given back"


@pytest.mark.full  # compiles for a minute
def test_compiled_blocks_learn_what_plain_ones_learn(tiny_model: TinyModel, tmp_path: Path) -> None:
    short = {"max_steps": 3}
    plain = config_for("wan", tiny_model, tmp_path / "plain", training={**short, **PLAIN}, logging=QUIET)
    compiled = config_for(
        "wan", tiny_model, tmp_path / "compiled", training={**short, **PLAIN, "compile": "on"}, logging=QUIET
    )
    run(plain)
    heard = CollectingView()
    run(compiled, heard)
    assert any("torch.compile on" in line for line in heard.lines)
    one, two = ([loss for _, _, loss, _ in losses(config)] for config in (plain, compiled))
    assert one == pytest.approx(two, rel=1e-3)


@pytest.mark.full  # compiles twice
def test_the_self_check_of_a_compiled_run_makes_no_graph_and_changes_no_loss(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, with a checkpoint in the middle: steps follow on the check of the file. CUDA graphs as they come."""
    sections: dict[str, Any] = {
        "training": {**PLAIN, "max_steps": 8, "compile": "on", "mixed_precision": "bf16"}, "logging": QUIET,
        "model": {"base_precision": "bf16"}, "checkpoints": {"every_steps": 6},
    }  # fmt: skip
    with_check, without = (config_for("flux", tiny_model, tmp_path / name, **sections) for name in ("with", "without"))
    prepared: list[Preparation] = []

    def kept(*args: Any, **options: Any) -> Preparation:
        prepared.append(prepare_blocks(*args, **options))
        return prepared[-1]

    monkeypatch.setattr("gracetune.train.trained_model.prepare_blocks", kept)
    heard = CollectingView()
    run(with_check, heard)
    (line,) = [line for line in heard.lines if line.startswith("self-check")]
    assert "the adapter changes the output by " in line
    assert "the saved file reproduces it" in line
    torch._dynamo.reset()
    monkeypatch.setattr("gracetune.train.callbacks.SelfCheck", Absent)
    run(without)
    first, second = (one.stats.graphs for one in prepared)
    assert first == second > 0
    assert losses(with_check) == losses(without)
    assert_same_end(with_check, without, 8)


@pytest.mark.full  # compiles for a minute
def test_adapted_convolutions_learn_compiled_what_they_learn_plain(tiny_model: TinyModel, tmp_path: Path) -> None:
    """SDXL's convolutions are outside of the compiled blocks, and in front of everything else that is trained."""
    torch.use_deterministic_algorithms(False)
    adapter = {"kind": "lora", "rank": 4, "conv_rank": 2}
    one, two = (
        config_for(
            "sdxl", tiny_model, tmp_path / compiled, adapter=adapter, logging=QUIET,
            training={"max_steps": 6, "compile": compiled},
        )
        for compiled in ("off", "on")
    )  # fmt: skip
    files = [load_file(run(config).files[0]) for config in (one, two)]
    assert [loss for _, _, loss, _ in losses(two)] == pytest.approx([loss for _, _, loss, _ in losses(one)], rel=1e-3)
    for file in files:
        assert float(file["diffusion_model.input_blocks.4.0.in_layers.2.lora_B.weight"].abs().max()) > 0


@pytest.mark.parametrize("optimizer", ["adamw", "automagic", "lion", "adafactor"])
def test_gradients_that_are_no_numbers_leave_no_trace(optimizer: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """The host hears of them later; until then the device leaves every step out by itself."""
    good = {"id": "good", "path": str(images(tmp_path / "good")), "resolution": 64.0, "end_step": 2}
    bad = {
        "id": "bad", "path": str(images(tmp_path / "bad", 1)), "resolution": 64.0, "start_step": 2,
        "loss_weight": 1e38,
    }  # fmt: skip
    sections: dict[str, Any] = {"datasets": [good, bad], "optimizer": {"name": optimizer, "weight_decay": 0.1}}
    ema = {"ema": {"enabled": True, "decay": 0.9}}
    failed, until = (
        config_for(
            "wan", tiny_model, tmp_path / name, logging={**QUIET, "every_steps": 100},
            training={"max_steps": steps, **PLAIN, **ema}, **sections,
        )
        for name, steps in (("failed", 30), ("until", 2))
    )  # fmt: skip
    result = run(failed)
    assert result.stop is not None
    assert (result.stop.kind, result.step) == ("failed", 2)
    assert "the gradients of step 3 are not finite" in result.stop.reason
    run(until)
    assert_same_states(failed, until, 2)


def test_the_host_never_waits_inside_a_window(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = gracetune.train.loop.run_step

    def watched(job: Any) -> Any:
        if job.position.step < 2:  # what both experts make once, in their first steps
            return original(job)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(job)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(gracetune.train.loop, "run_step", watched)
    assert run(dual(tmp_path, tiny_model, logging={**QUIET, "every_steps": 100})).step == STEPS
