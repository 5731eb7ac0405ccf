"""Run folders with event logs of any length, as a run writes them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gracetune.checkpoint.folder import LOCK_FILE
from gracetune.telemetry.events import SCHEMA_VERSION, Event, Record, RunEnded, RunStarted, StepDone
from gracetune.telemetry.schema import to_line

BEGAN_S = 1_795_000_000.0


def started(**more: Any) -> RunStarted:
    given: dict[str, Any] = {
        "run": "cats", "total_steps": 100, "family": "sdxl", "model": "sdxl-base", "adapter": "lora",
        "adapter_format": "comfyui", "machine": "no GPU; 2 CPUs; cpu", "versions": {"torch": "2.13.0"},
        "config": {"name": "cats", "optimizer": {"lr": 1e-4}, "datasets": [{"id": "a", "path": "/data/a"}]},
    }  # fmt: skip
    return RunStarted(**given | more)


def step(number: int, **more: Any) -> StepDone:
    given: dict[str, Any] = {
        "step": number, "epoch": number // 10, "loss": 1 / (1 + number / 50), "step_ms": 250.0, "lr": {"all": 1e-4},
        "grad_norm": 0.5, "samples": 4 * number, "data_wait_ms": 1.5, "micro_batch": 2, "accumulation": 2,
    }  # fmt: skip
    return StepDone(**given | more)


def ended(number: int, **more: Any) -> RunEnded:
    given: dict[str, Any] = {"step": number, "outcome": "finished", "outputs": ("cats.safetensors",)}
    return RunEnded(**given | more)


def write_run(folder: Path, events: Iterable[Event], *, begin: float = BEGAN_S) -> Path:
    """Append events to the log of a run, one per second."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints").mkdir(exist_ok=True)
    with (folder / "logs" / "events.jsonl").open("ab") as file:
        for number, event in enumerate(events):
            file.write(to_line(Record(begin + number, event)))
    return folder


def small_run(folder: Path, steps: int = 5, *, outcome: str = "finished", **start: Any) -> Path:
    return write_run(
        folder, [started(**start), *(step(one) for one in range(1, steps + 1)), ended(steps, outcome=outcome)]
    )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's lock, as its process does."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "checkpoints" / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def long_log(folder: Path, steps: int) -> Path:
    """A log with a million events in seconds: lines are made from a template. Two experts take turns; the steps after
    three quarters were done twice, because the run was resumed."""
    (folder / "logs").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    line = (
        '{"v":%d,"kind":"StepDone","time_s":%.1f,"step":%d,"epoch":%d,"loss":%.4f,"step_ms":250.0,"steps":1,"stage":"%s",'
        '"lr":{"high_noise":0.0001,"low_noise":0.0002},"grad_norm":0.5,"samples":%d,"data_wait_ms":1.5,"compile_ms":0.0,'
        '"micro_batch":2,"accumulation":2}\n'
    )
    memory = (
        '{"v":%d,"kind":"MemorySampled","time_s":%.1f,"step":%d,"used_bytes":{"host":{"weights":%d}},'
        '"capacity_bytes":{"host":64000000000},"counters":{},"unavailable":{}}\n'
    )
    resumed_at = steps * 3 // 4

    def lines() -> Iterator[str]:
        yield to_line(Record(BEGAN_S, started(total_steps=steps))).decode()
        for number in (*range(1, resumed_at + 1000), 0, *range(resumed_at + 1, steps + 1)):
            if number == 0:
                yield _line("Warned", BEGAN_S + resumed_at, message="only once", step=resumed_at)
                yield to_line(
                    Record(BEGAN_S + resumed_at, started(total_steps=steps, resumed_step=resumed_at))
                ).decode()
                continue
            stage = "high_noise" if number % 2 else "low_noise"
            loss = 1 / (1 + number / 1000)
            yield line % (SCHEMA_VERSION, BEGAN_S + number, number, number // 100, loss, stage, 4 * number)
            if number % 100 == 0:
                yield memory % (SCHEMA_VERSION, BEGAN_S + number, number, 1_000_000_000 + number)

    with (folder / "logs" / "events.jsonl").open("w") as file:
        file.writelines(lines())
    return folder


def _line(kind: str, time_s: float, **fields: Any) -> str:
    return json.dumps({"v": SCHEMA_VERSION, "kind": kind, "time_s": time_s, **fields}, separators=(",", ":")) + "\n"
