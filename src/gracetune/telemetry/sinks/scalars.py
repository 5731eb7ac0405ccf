"""The scalars of an event that trackers plot, as tag -> value. A pure function.

Tags are "group/name". Their units are those of the events' fields (`events.py`). In `StepDone` and `HeldOutLoss`,
`stage` is the trained expert; `uvm.stage` is the memory stage.
"""

from __future__ import annotations

from gracetune.telemetry.events import (
    CheckpointWritten,
    EffectiveBatchChanged,
    Event,
    HeldOutLoss,
    LookAheadChanged,
    MemoryReclaimed,
    MemorySampled,
    MemoryStageChanged,
    StepDone,
    ValidationDone,
)


def scalars(event: Event) -> dict[str, float]:
    """Tag -> value; empty for events without scalars."""
    match event:
        case StepDone():
            return _step(event)
        case MemorySampled():
            return _memory(event)
        case MemoryStageChanged():
            return {"uvm/uvm.stage": event.after}
        case MemoryReclaimed():
            return {f"uvm/{event.extent}_reclamation_ms": event.duration_ms}
        case LookAheadChanged():
            return {"memory/look_ahead_batches": event.after}
        case EffectiveBatchChanged():
            return {"train/effective_batch": event.after}
        case HeldOutLoss():
            prefix = f"held_out/{event.stage}/" if event.stage else "held_out/"
            return {f"{prefix}mean": event.mean, **{f"{prefix}{level}": loss for level, loss in event.losses.items()}}
        case CheckpointWritten():
            return {"checkpoint/snapshot_ms": event.snapshot_ms, "checkpoint/write_ms": event.write_ms}
        case ValidationDone():
            return {"validation/duration_s": event.duration_s}
    return {}


def _step(event: StepDone) -> dict[str, float]:
    found: dict[str, float] = {
        "train/loss": event.loss,
        "train/epoch": event.epoch,
        "train/samples": event.samples,
        "train/micro_batch": event.micro_batch,
        "train/accumulation": event.accumulation,
        "time/step_ms": event.step_ms,
        "time/data_wait_ms": event.data_wait_ms,
        **{f"lr/{group}": rate for group, rate in event.lr.items()},
    }
    if event.stage:
        found[f"train/loss/{event.stage}"] = event.loss
    if event.grad_norm is not None:
        found["train/grad_norm"] = event.grad_norm
    if event.compile_ms:
        found["time/compile_ms"] = event.compile_ms
    return found


def _memory(event: MemorySampled) -> dict[str, float]:
    found: dict[str, float] = {}
    for tier, owners in event.used_bytes.items():
        found[f"memory/{tier}_bytes"] = sum(owners.values())
        found.update({f"memory/{tier}/{owner}_bytes": size for owner, size in owners.items()})
    # Trackers group tags by what precedes the slash: the counter "uvm.stage" becomes "uvm/uvm.stage".
    found.update({f"{name.split('.')[0]}/{name}": value for name, value in event.counters.items()})
    return found
