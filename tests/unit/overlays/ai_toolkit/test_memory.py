"""The memory layer under the stand-in's training. The layer itself needs a GPU; its governor is real here."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gracetune import gh200
from gracetune.config.environment import Environment
from gracetune.config.memory_options import MemoryOptions
from gracetune.errors import ConfigError
from gracetune.memory.errors import MemoryPressure
from gracetune.memory.governor import Decision, Governor, PressureLimits
from gracetune.memory.native import Unavailable
from gracetune.memory.sensors import DeviceReading, MemoryReading
from gracetune.units import GIB
from unit.overlays.ai_toolkit.checkouts import Checkout

CALM = MemoryReading(arena_active=0, device=DeviceReading(50 * GIB, 96 * GIB), host_headroom=200 * GIB)
TIGHT = MemoryReading(arena_active=GIB, device=DeviceReading(1 * GIB, 96 * GIB), host_headroom=200 * GIB)
EXHAUSTED = MemoryReading(arena_active=GIB, device=DeviceReading(1 * GIB, 96 * GIB), host_headroom=GIB)


@dataclass
class Layer:
    """Sensors that say what a test wants, and the real governor on them."""

    readings: list[MemoryReading]
    closed: bool = False
    heap: str = "heap"
    arena_size: Any = field(default_factory=lambda: SimpleNamespace(reason="384 GiB, as asked"))

    def __post_init__(self) -> None:
        self.governor = Governor(self, self, PressureLimits(0.10, 0, 8 * GIB))

    def read(self) -> MemoryReading:
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]

    def synchronize(self) -> None: ...

    def release_device_cache(self) -> None: ...

    def release_host_caches(self) -> None: ...

    def demote_cold(self, *, at_most: int, include_recent: bool) -> None: ...

    def step(self) -> Decision:
        return self.governor.sample()

    @property
    def memory_is_tight(self) -> bool:
        return self.governor.state.stage == 2

    def stats(self) -> dict[str, float]:
        return {"uvm.transitions": self.governor.counters.transitions, "allocated_bytes.all.current": 1}

    def close(self) -> None:
        self.closed = True


class Run:
    """A job whose process believes it has a GPU, with `opened` in place of the memory layer."""

    def __init__(self, checkout: Checkout, monkeypatch: pytest.MonkeyPatch, opened: Any, block: Any = None) -> None:
        self.requested: list[tuple[MemoryOptions, dict[str, Any]]] = []

        def opener(options: MemoryOptions, machine: Any, **more: Any) -> Any:
            self.requested.append((options, more))
            return opened

        feature = partial(checkout.ours("memory").MemoryFeature, opener=opener)
        monkeypatch.setattr(checkout.ours("session"), "MemoryFeature", feature)
        requested = {"memory": {"use_uvm": True} if block is None else block}
        if requested["memory"].get("enable_uvm_hints"):
            requested["caches"] = {"latents": "unified_memory"}
        self.job = checkout.job(checkout.process(requested))
        self.process = self.job.process[0]
        self.process.device_torch = torch.device("cuda", 1)
        self.report_file = checkout.output() / "gracetune_overlay.json"

    def report(self) -> Any:
        return json.loads(self.report_file.read_text())["features"]["memory"]


class TestTheGovernor:
    def test_samples_at_every_steps_end_after_ai_toolkits_own_hook(
        self, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer = Layer([CALM])
        run = Run(checkout, monkeypatch, layer)
        run.job.run()
        assert run.report() == {"available": True, "why_not": "", "samples": 6, "stats": {"uvm.transitions": 0}}
        assert run.process.steps_ended == 6
        assert layer.closed

    def test_a_change_of_stage_is_said(
        self, checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = Run(checkout, monkeypatch, Layer([CALM, TIGHT, TIGHT, CALM]))
        run.job.run()
        stated = capsys.readouterr().err
        assert "gracetune: overflow arena: 384 GiB, as asked" in stated
        assert stated.count("stage 1 -> 2: the overflow arena holds 1.00 GiB") == 1
        assert stated.count("stage 2 -> 1: calm for 3 samples") == 1
        assert run.report()["stats"] == {"uvm.transitions": 2}

    def test_saves_before_main_memory_runs_out(self, checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
        layer = Layer([CALM, CALM, EXHAUSTED])
        run = Run(checkout, monkeypatch, layer)
        with pytest.raises(MemoryPressure):
            run.job.run()
        assert (checkout.output() / "my_job_000000003.safetensors").exists()
        assert layer.closed

    def test_a_trainer_that_skips_the_hook_is_noticed(
        self, checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = Run(checkout, monkeypatch, Layer([CALM]))
        run.process.end_step_hook = lambda: None
        run.job.run()
        assert "the governor never ran" in capsys.readouterr().err
        assert run.report()["samples"] == 0


class TestOpening:
    def test_the_layer_gets_the_options_and_the_device(
        self, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
        run = Run(checkout, monkeypatch, Layer([CALM]), {"use_uvm": True, "uvm_access_pattern": "balanced"})
        run.job.run()
        ((options, more),) = run.requested
        assert (options.use_uvm, options.uvm_access_pattern) == (True, "balanced")
        assert more == {"device": 1, "allocator_string": "max_split_size_mb:512", "local_ranks": 1}

    def test_what_cannot_be_had_is_said_and_training_goes_on(
        self, checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = Run(checkout, monkeypatch, Unavailable("no driver", "install one"))
        run.job.run()
        assert "gracetune: memory: not available: no driver; install one" in capsys.readouterr().err
        assert len(run.process.losses) == 6
        assert run.report()["available"] is False

    def test_our_options_are_taken_out_of_pytorchs_string(
        self, checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "use_uvm:True,max_split_size_mb:512")
        run = Run(checkout, monkeypatch, Layer([CALM]), {})
        run.job.run()
        assert Environment.capture().get("PYTORCH_CUDA_ALLOC_CONF") == "max_split_size_mb:512"
        assert run.requested[0][0].use_uvm is True
        assert "took use_uvm for gracetune's memory layer" in capsys.readouterr().err

    def test_hints_follow_the_block_for_the_length_of_the_run(
        self, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = Run(checkout, monkeypatch, Layer([CALM]), {"enable_uvm_hints": True})
        seen = []
        run.process.before_loop = lambda: seen.append(gh200.gh200_uvm_enabled().reason)
        monkeypatch.setattr(checkout.ours("caches").CacheFeature, "hooks", lambda self: [])
        run.job.run()
        assert seen[0].startswith("set_uvm_hint_override(True)")
        assert "SIMPLETUNER_GH200_ENABLE_UVM_HINTS is not set" in gh200.gh200_uvm_enabled().reason


class TestOptions:
    @pytest.fixture
    def merged(self, checkout: Checkout) -> Any:
        return checkout.ours("memory").merged_options

    def test_the_block_goes_before_the_environment(self, merged: Any) -> None:
        environment = Environment({"GH200_UVM_OVERSUBSCRIPTION_RATIO": "3", "GH200_UVM_ACCESS_PATTERN": "gpu_first"})
        found = merged(MemoryOptions(uvm_oversubscription_ratio=2.0), environment)
        assert found == MemoryOptions(use_uvm=True, uvm_oversubscription_ratio=2.0, uvm_access_pattern="gpu_first")

    def test_a_mistake_in_the_environment_is_rejected(self, merged: Any) -> None:
        with pytest.raises(ConfigError, match="GH200_UVM_ACCESS_PATTERN"):
            merged(MemoryOptions(), Environment({"GH200_UVM_ACCESS_PATTERN": "sideways"}))
