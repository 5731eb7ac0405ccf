"""The events of a small run, and a hypothesis strategy for arbitrary events."""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union

from hypothesis import strategies as st
from PIL import Image

from gracetune.telemetry.events import (
    EVENTS,
    CheckpointWritten,
    EffectiveBatchChanged,
    Event,
    HeldOutLoss,
    LookAheadChanged,
    MemoryReclaimed,
    MemorySampled,
    MemoryStageChanged,
    OverflowArenaChanged,
    Planned,
    PlannedChange,
    PlannedMemory,
    PlannedTier,
    Record,
    RequestServed,
    RunEnded,
    RunStarted,
    SampleFile,
    SelfChecked,
    StageSwitched,
    StepDone,
    ValidationDone,
    Warned,
)
from gracetune.telemetry.sinks.jsonl import JsonlSink

NASTY = '<script>alert("x")</script> & "quotes" </pre>'


def start(resumed_step: int | None = None) -> RunStarted:
    return RunStarted(
        run=f"cats {NASTY}",
        resumed_step=resumed_step,
        total_steps=20,
        family="wan",
        model="org/wan",
        adapter="lora",
        adapter_format="comfyui",
        machine="one GH200",
        versions={"torch": "2.13.0", "gracetune": "0.1"},
        config={"name": "cats", "note": NASTY, "nested": {"lr": 1e-4, "url": "https://example.org/x"}},
        preparation_s={"loading the model": 20.0, NASTY: 5.0, "everything else": 0.0},
    )


def step(number: int, loss: float | None = None, **more: Any) -> StepDone:
    stage = "high_noise" if number % 2 else "low_noise"
    given: dict[str, Any] = {
        "step": number,
        "epoch": number // 8,
        "stage": stage,
        "loss": 1 / (number + 0.37) if loss is None else loss,
        "lr": {"high_noise": 1e-4 / (number + 1), "low_noise": 2e-4},
        "grad_norm": 0.5 + number / 7,
        "samples": number * 4,
        "step_ms": 900.0 + number,
        "data_wait_ms": 1.5 + number,
        "micro_batch": 2,
        "accumulation": 1 + number // 10,
    }
    return StepDone(**{**given, **more})


def planned() -> Planned:
    return Planned(
        verdict="fits with these changes",
        summary="peak 85.8 GiB of 90.2 GiB usable in GPU memory",
        tiers=(
            PlannedTier(
                name="device", label="GPU memory", capacity_bytes=96 << 30, budget_bytes=90 << 30, peak_bytes=86 << 30
            ),
            PlannedTier(name="disk", label="disk", why="not asked"),
        ),
        lines=(
            PlannedMemory(
                owner="weights", tier="device", bytes=28 << 30, phases=("load", "train"), why=f"bf16 {NASTY}"
            ),
            PlannedMemory(owner="latent cache", tier="host", bytes=7 << 30, phases=("train",)),
        ),
        changes=(
            PlannedChange(key="model.vae_tiling", before="false", after="true", saves_bytes=1 << 30, automatic=False),
        ),
    )


def memory(number: int) -> MemorySampled:
    return MemorySampled(
        step=number,
        used_bytes={"device": {"weights": 28 << 30, "activations": (3 + number) << 30}, "host": {"caches": 7 << 30}},
        capacity_bytes={"device": 96 << 30, "host": 480 << 30},
        counters={"uvm.stage": 1 + number // 10, "uvm.prefetch_wait_ms": 0.25 * number, "cache.latents.hit_rate": 0.97},
        unavailable={"page faults": "the driver does not count them here"},
    )


def whole_run(folder: Path) -> list[Event]:
    """20 steps with every kind of event. The generated samples are in `folder`."""
    samples = folder / "samples"
    samples.mkdir(parents=True, exist_ok=True)
    (samples / "clip #1.mp4").write_bytes(b"a clip")
    events: list[Event] = [start(), planned()]
    for number in range(21):
        if number:
            events += [step(number), memory(number)]
        if number % 5 == 0:
            Image.new("RGB", (300, 200), (number * 10, 50, 90)).save(samples / f"cat {number}.png")
            files = (
                SampleFile(path=f"samples/cat {number}.png", kind="image", prompt=f"a cat {NASTY}", seed=3),
                SampleFile(path="samples/clip #1.mp4", kind="video", prompt="a running cat", seed=4),
                SampleFile(path="../outside.png", kind="image", prompt="gone"),
            )
            events += [ValidationDone(step=number, files=files, duration_s=2.5)]
            events += [HeldOutLoss(step=number, stage="high_noise", losses={"0.9": 0.25}, mean=0.251 - number / 1000)]
            events += [CheckpointWritten(step=number, path=f"checkpoints/checkpoint-{number}", size_bytes=12345678,
                                         snapshot_ms=11.0, write_ms=222.0, removed=("checkpoint-1",))]  # fmt: skip
    events.append(StageSwitched(step=7, before="high_noise", after="low_noise", reason="every 1 steps"))
    events.append(EffectiveBatchChanged(step=9, before=2, after=4, micro_batch=2, accumulation=2, reason="the ramp"))
    events.append(OverflowArenaChanged(step=9, before_bytes=0, after_bytes=3 << 30, reason="spilled"))
    events.append(MemoryStageChanged(step=9, before=1, after=2, reason="the device is full"))
    events.append(MemoryReclaimed(step=9, extent="light", released_bytes=5 << 20, duration_ms=7.0, reason="reclaimed"))
    events.append(LookAheadChanged(step=10, before=3, after=2, reason="memory is tight"))
    events.append(SelfChecked(step=6, expert="high_noise", layers=40, idle=("proj_out",), change=1.25e-3))
    events.append(SelfChecked(step=9, expert="high_noise", layers=40, file="a.safetensors", file_difference=3e-6))
    events.append(RequestServed(request="save", step=8, source="studio"))
    events.append(Warned(message=f"something odd {NASTY}", step=9))
    return events


def end(**more: Any) -> RunEnded:
    return RunEnded(**{"step": 20, "outcome": "finished", "duration_s": 60.0, **more})


def write_log(folder: Path, events: typing.Iterable[Event]) -> Path:
    path = folder / "logs" / "events.jsonl"
    sink = JsonlSink(path)
    for number, event in enumerate(events):
        sink.write(Record(1_800_000_000.0 + number, event))
    sink.close()
    return path


# -- any event --------------------------------------------------------------------------------------------------------

_PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _strategy(hint: Any) -> st.SearchStrategy[Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _PLAIN
    if origin in (Union, types.UnionType):
        return st.one_of(*(st.none() if one is types.NoneType else _strategy(one) for one in inner))
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is tuple:
        return st.lists(_strategy(inner[0]), max_size=3).map(tuple)
    if origin is not None:
        return st.dictionaries(st.text(max_size=8), _strategy(inner[1]), max_size=3)
    if dataclasses.is_dataclass(hint):
        return _object(typing.cast("type[Any]", hint))
    scalars: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(0, 50) | st.integers(-(2**62), 2**62),
        float: st.floats(),
        str: st.text(max_size=20),
        bool: st.booleans(),
    }
    return scalars[hint]


def _object(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{one.name: _strategy(hints[one.name]) for one in dataclasses.fields(kind)})


any_event: st.SearchStrategy[Event] = st.one_of(*(_object(kind) for kind in EVENTS))
