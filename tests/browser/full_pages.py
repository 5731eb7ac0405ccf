"""Logs of runs that fill every part of every page, as runs on a large machine write them."""

from __future__ import annotations

import math
from pathlib import Path

from PIL import Image

from gracetune.telemetry.events import (
    Event,
    HeldOutLoss,
    LookAheadChanged,
    MemoryReclaimed,
    MemorySampled,
    MemoryStageChanged,
    OverflowArenaChanged,
    Planned,
    PlannedMemory,
    PlannedTier,
    RequestServed,
    SampleFile,
    StageSwitched,
    ValidationDone,
    Warned,
)
from unit.studio.logs import ended, started, step, write_run

GIB = 1 << 30
STEPS = 200
LONG_NAME = "a-very-long-name-of-a-run-that-someone-typed-without-thinking-of-the-tables-that-show-it"
PROMPT = "a lighthouse on a rock in the evening, with a description that is longer than its place"


def write_runs(root: Path) -> Path:
    """The run `live`, without an end, and others in other states. Returns the folder of the first."""
    run = write_run(root / "live", _events(root / "live"))
    write_run(root / LONG_NAME, [*_events(root / LONG_NAME, lr=2e-4), ended(STEPS)])
    broken = ended(9, outcome="failed", reason="CUDA out of memory: tried to allocate 2.00 GiB")
    write_run(root / "broken", [started(run="broken"), step(9), broken])
    (run / "live.safetensors").write_bytes(b"1")
    return run


def _events(run: Path, lr: float = 1e-4) -> list[Event]:
    config = {"name": run.name, "optimizer": {"lr": lr}, "memory": {"uvm_stage1_threshold": 0.1}}
    machine = "NVIDIA GH200 480GB; 72 CPUs; gh200"
    found: list[Event] = [
        started(run=run.name, family="wan", adapter="lokr", machine=machine, total_steps=2000, config=config), _plan(),
        LookAheadChanged(step=0, before=0, after=3, reason="start"),
        MemoryStageChanged(step=0, before=1, after=1, reason="everything fits"),
    ]  # fmt: skip
    for number in range(1, STEPS + 1):
        expert = "high_noise" if number % 2 else "low_noise"
        rates = {"high_noise": lr, "low_noise": lr / 2}
        found.append(step(number, stage=expert, loss=0.1 + 0.05 * math.sin(number), lr=rates))
        if number % 20 == 0:
            found.append(_memory(number))
        if number % 50 == 0:
            found += [HeldOutLoss(step=number, mean=0.1), _samples(run, number)]
    return [
        *found, StageSwitched(step=60, before="high_noise", after="low_noise", reason="the experts take turns"),
        MemoryStageChanged(step=90, before=1, after=2, reason="8.1 GiB free, below 9.5 GiB"),
        MemoryReclaimed(step=90, extent="light", released_bytes=GIB, duration_ms=40.0, reason="stage 2"),
        OverflowArenaChanged(step=91, before_bytes=GIB, after_bytes=2 * GIB, reason="it was full"),
        Warned(message="the loss of 2 of 40 clips is much higher than that of the others", step=100),
        RequestServed(request="save", step=110, source="studio"),
    ]  # fmt: skip


def _plan() -> Planned:
    def line(role: str, tier: str, size: float) -> PlannedMemory:
        why = "bf16, 14.3 G parameters"
        return PlannedMemory(
            owner=f"{role} of high noise", tier=tier, bytes=int(size * GIB), phases=("train",), role=role, why=why
        )

    tiers = (
        PlannedTier(
            name="device", label="GPU memory", capacity_bytes=95 * GIB, budget_bytes=90 * GIB, peak_bytes=86 * GIB
        ),
        PlannedTier(
            name="host", label="main memory", capacity_bytes=480 * GIB, budget_bytes=440 * GIB, peak_bytes=61 * GIB
        ),
    )
    lines = (
        line("frozen weights", "device", 26.6), line("activations", "device", 45.8), line("batch ring", "device", 1.2),
        line("frozen weights", "host", 26.6), line("latent cache", "host", 7),
    )  # fmt: skip
    return Planned(verdict="fits", summary="peak 85.8 GiB of 90.2 GiB usable in GPU memory", tiers=tiers, lines=lines)


def _memory(number: int) -> MemorySampled:
    device = {"frozen weights": 26 * GIB, "trained weights": GIB // 5, "other": 44 * GIB}
    return MemorySampled(
        step=number, used_bytes={"device": device, "host": {"process": 39 * GIB}, "arena": {"spilled": GIB}},
        capacity_bytes={"device": 95 * GIB, "host": 480 * GIB, "arena": 2 * GIB},
        counters={"uvm.stage": 2.0, "uvm.prefetched_bytes": float(number * GIB), "uvm.prefetch_wait_ms": 0.3 * number},
        unavailable={"uvm.gpu_page_faults": "the driver does not count them here"},
    )  # fmt: skip


def _samples(run: Path, number: int) -> ValidationDone:
    (run / "samples").mkdir(parents=True, exist_ok=True)
    files = []
    for index in range(5):
        path = run / "samples" / f"step_{number}_{index}.png"
        Image.new("RGB", (96, 64), (number, 40 * index, 128)).save(path)
        files.append(SampleFile(path=f"samples/{path.name}", kind="image", prompt=PROMPT, seed=index))
    return ValidationDone(step=number, files=tuple(files), duration_s=41.0)
