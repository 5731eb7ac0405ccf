"""Everything a run tells about itself. Each event is plain data, with the unit in the name where there is one.

The event log holds one of them a line; `docs/events.md` is made from the notes here (see `schema`). Adding a field with
a default keeps the version; anything else raises `SCHEMA_VERSION`. Logs of every version in `READ_VERSIONS` are read.

    1   the first one
    2   adds EffectiveBatchChanged, OverflowArenaChanged, MemoryReclaimed, LookAheadChanged and SelfChecked
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

SCHEMA_VERSION = 2
READ_VERSIONS = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A process began to train. A log holds one for each; what an earlier one did after `resumed_step` is void."""

    run: Annotated[str, "name of the run"]
    resumed_step: Annotated[int | None, "optimizer steps done before; null: the run begins anew"] = None
    total_steps: Annotated[int | None, "optimizer steps at the end; null: not known"] = None
    world_size: Annotated[int, "processes"] = 1
    family: Annotated[str, "of the model"] = ""
    model: Annotated[str, "folder or hub id of the weights"] = ""
    adapter: Annotated[str, "lora, lokr, ..., full_finetune"] = ""
    adapter_format: Annotated[str, "of the files the run writes: comfyui, diffusers, kohya, lycoris"] = ""
    machine: Annotated[str, "what it runs on, in words"] = ""
    versions: Annotated[Mapping[str, str], "of gracetune, Python and the libraries"] = field(default_factory=dict)
    config: Annotated[Mapping[str, Any], "the resolved configuration"] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """Optimizer steps were done: one, or the few since the event before. Means are over these."""

    step: Annotated[int, "optimizer steps done since the run began"]
    epoch: Annotated[int, "counted from 0"]
    loss: Annotated[float, "mean over the samples"]
    step_ms: Annotated[float, "mean duration of an optimizer step, waiting for data included"]
    steps: Annotated[int, "how many optimizer steps this event speaks of"] = 1
    stage: Annotated[str, "expert trained: high_noise, low_noise; empty where there is one only"] = ""
    lr: Annotated[Mapping[str, float], "learning rate by parameter group; the mean where each element has its own"] = (
        field(default_factory=dict)
    )
    grad_norm: Annotated[float | None, "before clipping"] = None
    samples: Annotated[int, "samples consumed since the run began, over all processes"] = 0
    data_wait_ms: Annotated[float, "mean time a step waited for its data"] = 0.0
    compile_ms: Annotated[float, "spent compiling; not part of step_ms"] = 0.0
    micro_batch: Annotated[int, "samples of one process's micro-batch"] = 1
    accumulation: Annotated[int, "micro-batches of one process in an optimizer step"] = 1


@dataclass(frozen=True, kw_only=True)
class StageSwitched(Event):
    """The next optimizer step trains another expert than the last one. Emitted as that step begins."""

    step: Annotated[int, "optimizer steps done"]
    before: Annotated[str, "expert trained until now; empty at a process's first step"]
    after: Annotated[str, "expert trained from now on"]
    reason: Annotated[str, "why"] = ""


@dataclass(frozen=True, kw_only=True)
class EffectiveBatchChanged(Event):
    """The batch ramp: the next optimizer step has more samples than the last one. Emitted as that step begins."""

    step: Annotated[int, "optimizer steps done"]
    before: Annotated[int | None, "samples of an optimizer step until now, all processes; null: a process's first step"]
    after: Annotated[int, "samples of an optimizer step from now on, all processes"]
    micro_batch: Annotated[int, "samples of one process's micro-batch"]
    accumulation: Annotated[int, "micro-batches of one process in an optimizer step"]
    reason: Annotated[str, "why"] = ""


@dataclass(frozen=True, kw_only=True)
class MemoryStageChanged(Event):
    """The memory stage (`uvm.stage`) changed: 1, everything fits; 2, something spills or is about to."""

    step: Annotated[int, "optimizer steps done"]
    before: Annotated[int, "memory stage until now"]
    after: Annotated[int, "memory stage from now on"]
    reason: Annotated[str, "why"] = ""


@dataclass(frozen=True, kw_only=True)
class MemoryReclaimed(Event):
    """Memory was reclaimed at a step boundary. A hard reclamation waits for the GPU, a light one does not."""

    step: Annotated[int, "optimizer steps done"]
    extent: Annotated[Literal["light", "hard"], "which of the two"]
    released_bytes: Annotated[int | None, "GPU memory PyTorch gave back to the driver; null: not known"] = None
    demoted_bytes: Annotated[int | None, "managed memory sent from the GPU to main memory; null: not known"] = None
    duration_ms: Annotated[float, "how long training was held up"] = 0.0
    reason: Annotated[str, "why"] = ""


@dataclass(frozen=True, kw_only=True)
class OverflowArenaChanged(Event):
    """The overflow arena is used, holds more than ever before, or is empty again."""

    step: Annotated[int, "optimizer steps done"]
    before_bytes: Annotated[int, "the most it held in the step before"]
    after_bytes: Annotated[int, "the most it held in this step, as far as PyTorch's counters tell"]
    reason: Annotated[str, "why"] = ""


@dataclass(frozen=True, kw_only=True)
class LookAheadChanged(Event):
    """More or fewer batches are brought to the GPU ahead of their step."""

    step: Annotated[int, "optimizer steps done"]
    before: Annotated[int, "batches ahead until now"]
    after: Annotated[int, "batches ahead from now on"]
    reason: Annotated[str, "why"] = ""


@dataclass(frozen=True, kw_only=True)
class MemorySampled(Event):
    """Memory at a step boundary, and the counters of the unified-memory layer and the caches. Written at a process's
    first log step, at the first one after an event that changes what memory holds, every 30 seconds, and at the
    end."""

    step: Annotated[int, "optimizer steps done"]
    used_bytes: Annotated[
        Mapping[str, Mapping[str, int]], "tier (device, host, arena) -> owner (weights, ...) -> bytes"
    ]
    capacity_bytes: Annotated[
        Mapping[str, int],
        "of each tier whose size is known: what this process may use of the GPU, of main memory, of the overflow arena",
    ] = field(default_factory=dict)
    counters: Annotated[
        Mapping[str, float], "dotted names: uvm.stage, uvm.prefetch_wait_ms, cache.latents.hit_rate, ..."
    ] = field(default_factory=dict)
    unavailable: Annotated[Mapping[str, str], "what this machine cannot tell -> why"] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(Event):
    """A checkpoint is complete and on the disk."""

    step: Annotated[int, "optimizer steps done when it was made"]
    path: Annotated[str, "relative to the run's folder"]
    size_bytes: Annotated[int, "of all its files"]
    snapshot_ms: Annotated[float, "how long training was held up"]
    write_ms: Annotated[float, "how long writing took in the background"]
    removed: Annotated[tuple[str, ...], "older checkpoints deleted afterwards"] = ()


@dataclass(frozen=True, kw_only=True)
class SampleFile:
    """One file a validation made."""

    path: Annotated[str, "relative to the run's folder"]
    kind: Annotated[Literal["image", "video", "audio"], "what it is"]
    prompt: Annotated[str, "what was asked for"] = ""
    seed: Annotated[int | None, "of its noise"] = None


@dataclass(frozen=True, kw_only=True)
class ValidationDone(Event):
    """Samples were drawn."""

    step: Annotated[int, "optimizer steps done"]
    files: Annotated[tuple[SampleFile, ...], "in the order of the prompts"]
    sheet: Annotated[str | None, "contact sheet, relative to the run's folder"] = None
    duration_s: Annotated[float, "how long it took"] = 0.0
    requested: Annotated[bool, "asked for by hand"] = False


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss(Event):
    """The loss on samples that are not trained on, at fixed noise levels."""

    step: Annotated[int, "optimizer steps done"]
    stage: Annotated[str, "noise expert asked; empty where there is one only"] = ""
    losses: Annotated[Mapping[str, float], "noise level -> mean loss"] = field(default_factory=dict)
    mean: Annotated[float, "over all levels"]


@dataclass(frozen=True, kw_only=True)
class SelfChecked(Event):
    """A check that what is trained has an effect: of an expert after its first three applied steps, and of the first
    file it is saved to."""

    step: Annotated[int, "optimizer steps done"]
    expert: Annotated[str, "noise expert checked; empty where there is one only"] = ""
    layers: Annotated[int, "adapted layers; of a full fine-tune: trained tensors"] = 0
    idle: Annotated[tuple[str, ...], "layers that have learnt nothing"] = ()
    change: Annotated[
        float | None,
        "of the denoiser's answer by the adapter, relative to the base model's; null: a file, or a full fine-tune",
    ] = None
    amplified: Annotated[float, "the adapter's strength in that, times the one it is trained with"] = 1.0
    file: Annotated[str, "that was read back, relative to the run's folder; empty: the model itself was checked"] = ""
    file_difference: Annotated[
        float | None,
        "of the file's values from the trained ones, relative to their size; of a full fine-tune: the largest of the "
        "tensors compared",
    ] = None


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Something the user should know, and that did not stop the run."""

    message: Annotated[str, "with what to type, where something can be done"]
    step: Annotated[int | None, "optimizer steps done; null: before or outside training"] = None


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """The run ended. A killed run leaves no such event; one that lost its first process has that of another one."""

    step: Annotated[int, "optimizer steps done"]
    outcome: Annotated[Literal["finished", "interrupted", "failed"], "how"]
    reason: Annotated[str, "why it was interrupted or failed"] = ""
    duration_s: Annotated[float, "of this process, from its RunStarted"] = 0.0
    outputs: Annotated[tuple[str, ...], "the results, relative to the run's folder"] = ()
    how_to_load: Annotated[Mapping[str, str], "program -> what to do there; empty: told by the files' names"] = field(
        default_factory=dict
    )


EVENTS: tuple[type[Event], ...] = (
    RunStarted,
    StepDone,
    StageSwitched,
    EffectiveBatchChanged,
    MemoryStageChanged,
    MemoryReclaimed,
    OverflowArenaChanged,
    LookAheadChanged,
    MemorySampled,
    CheckpointWritten,
    ValidationDone,
    HeldOutLoss,
    SelfChecked,
    Warned,
    RunEnded,
)


@dataclass(frozen=True)
class Record:
    """An event and when it happened."""

    time_s: float
    """Seconds since 1970, UTC."""
    event: Event


def step_of(event: Event) -> int | None:
    """None for events that belong to no step."""
    match event:
        case (
            StepDone(step=step)
            | StageSwitched(step=step)
            | EffectiveBatchChanged(step=step)
            | MemoryStageChanged(step=step)
            | MemoryReclaimed(step=step)
            | OverflowArenaChanged(step=step)
            | LookAheadChanged(step=step)
            | MemorySampled(step=step)
            | CheckpointWritten(step=step)
            | ValidationDone(step=step)
            | HeldOutLoss(step=step)
            | SelfChecked(step=step)
            | Warned(step=step)
            | RunEnded(step=step)
        ):
            return step
    return None
