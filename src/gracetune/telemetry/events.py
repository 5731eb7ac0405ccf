"""The events that a run emits. Each is plain data, with the unit in the field's name where there is one.

A line of the event log holds one event. `docs/events.md` is generated from the docstrings and annotations here (see
`schema`). Adding a field with a default keeps the version; any other change raises `SCHEMA_VERSION`. Logs of every
version in `READ_VERSIONS` can be read.

    1   the first version
    2   adds EffectiveBatchChanged, OverflowArenaChanged, MemoryReclaimed, LookAheadChanged and SelfChecked
    3   adds Planned and RequestServed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

SCHEMA_VERSION = 3
READ_VERSIONS = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A process starts to train. Each process writes one. What earlier processes did after `resumed_step` is void."""

    run: Annotated[str, "name of the run"]
    resumed_step: Annotated[
        int | None, "optimizer steps done before this start; null: the run starts from the beginning"
    ] = None
    total_steps: Annotated[int | None, "optimizer steps of the whole run; null: unknown"] = None
    world_size: Annotated[int, "number of processes"] = 1
    family: Annotated[str, "model family"] = ""
    model: Annotated[str, "folder or hub id of the weights"] = ""
    adapter: Annotated[str, "adapter kind: lora, lokr, ..., full_finetune"] = ""
    adapter_format: Annotated[str, "format of the files the run writes: comfyui, diffusers, kohya, lycoris"] = ""
    machine: Annotated[str, "description of the machine"] = ""
    versions: Annotated[Mapping[str, str], "versions of gracetune, Python and the libraries"] = field(
        default_factory=dict
    )
    config: Annotated[Mapping[str, Any], "the resolved configuration"] = field(default_factory=dict)
    preparation_s: Annotated[
        Mapping[str, float], "seconds of each part of this process's preparation for training, in order"
    ] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlannedTier:
    """A kind of memory in the plan."""

    name: Annotated[str, "device, host, pool (one memory for CPU and GPU) or disk"]
    label: Annotated[str, "name for display"]
    capacity_bytes: Annotated[int | None, "its size; null: unknown"] = None
    budget_bytes: Annotated[int | None, "the part that the plan may use; null: unknown or not limited"] = None
    peak_bytes: Annotated[int, "largest amount of it that the run needs"] = 0
    why: Annotated[str, "how the budget was found"] = ""


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Memory that one consumer needs."""

    owner: Annotated[str, "the consumer"]
    tier: Annotated[str, "the name of a tier"]
    bytes: Annotated[int, "its size"]
    phases: Annotated[tuple[str, ...], "phases of the run in which it is needed: encode, load, train, ..."] = ()
    why: Annotated[str, "reason for its placement"] = ""
    role: Annotated[str, "what it is for: an owner as in `MemorySampled` where that measures it"] = ""


@dataclass(frozen=True, kw_only=True)
class PlannedChange:
    """A deviation of the plan from the config or from the fastest placement."""

    key: Annotated[str, "what is changed"]
    before: Annotated[str, "as configured, or fastest"]
    after: Annotated[str, "as planned"]
    saves_bytes: Annotated[int, "bytes saved at the peak"] = 0
    why: Annotated[str, "what the change means"] = ""
    automatic: Annotated[bool, "made without an edit of the config"] = True


@dataclass(frozen=True, kw_only=True)
class Planned(Event):
    """The memory plan of the run on this machine, as `gracetune estimate` shows it. Follows each `RunStarted`."""

    verdict: Annotated[str, "fits, fits with these changes, does not fit, or unknown"]
    summary: Annotated[str, "the decisive number, as a sentence"] = ""
    tiers: Annotated[tuple[PlannedTier, ...], "the memory of this machine, the compute tier first"] = ()
    lines: Annotated[tuple[PlannedMemory, ...], "where every consumer is placed"] = ()
    changes: Annotated[tuple[PlannedChange, ...], "deviations from the config"] = ()
    mismatch: Annotated[str, "why the plan does not apply to these weights; empty: it applies"] = ""


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """One or more optimizer steps are done: those since the previous `StepDone`. Means are taken over these steps."""

    step: Annotated[int, "optimizer steps done since the run began"]
    epoch: Annotated[int, "counted from 0"]
    loss: Annotated[float, "mean over the samples"]
    step_ms: Annotated[float, "mean duration of an optimizer step, including the wait for data"]
    steps: Annotated[int, "number of optimizer steps this event covers"] = 1
    stage: Annotated[str, "expert trained: high_noise or low_noise; empty if the model has one denoiser"] = ""
    lr: Annotated[Mapping[str, float], "learning rate by parameter group; the mean if each element has its own"] = (
        field(default_factory=dict)
    )
    grad_norm: Annotated[float | None, "gradient norm before clipping"] = None
    samples: Annotated[int, "samples trained on since the run began, over all processes"] = 0
    data_wait_ms: Annotated[float, "mean time a step waited for its data"] = 0.0
    compile_ms: Annotated[float, "time spent compiling; not part of step_ms"] = 0.0
    micro_batch: Annotated[int, "samples in one process's micro-batch"] = 1
    accumulation: Annotated[int, "micro-batches of one process in an optimizer step"] = 1


@dataclass(frozen=True, kw_only=True)
class StageSwitched(Event):
    """The next optimizer step trains a different expert than the last one. Emitted as that step begins."""

    step: Annotated[int, "optimizer steps done"]
    before: Annotated[str, "expert trained until now; empty at a process's first step"]
    after: Annotated[str, "expert trained from now on"]
    reason: Annotated[str, "reason for the change"] = ""


@dataclass(frozen=True, kw_only=True)
class EffectiveBatchChanged(Event):
    """The batch ramp: the next optimizer step has more samples than the last one. Emitted as that step begins."""

    step: Annotated[int, "optimizer steps done"]
    before: Annotated[int | None, "samples of an optimizer step until now, all processes; null: a process's first step"]
    after: Annotated[int, "samples of an optimizer step from now on, all processes"]
    micro_batch: Annotated[int, "samples in one process's micro-batch"]
    accumulation: Annotated[int, "micro-batches of one process in an optimizer step"]
    reason: Annotated[str, "reason for the change"] = ""


@dataclass(frozen=True, kw_only=True)
class MemoryStageChanged(Event):
    """The memory stage (`uvm.stage`) changed: 1, everything fits; 2, something spills or is about to."""

    step: Annotated[int, "optimizer steps done"]
    before: Annotated[int, "memory stage until now"]
    after: Annotated[int, "memory stage from now on"]
    reason: Annotated[str, "reason for the change"] = ""


@dataclass(frozen=True, kw_only=True)
class MemoryReclaimed(Event):
    """Memory was reclaimed at a step boundary. A hard reclamation waits for the GPU, a light one does not."""

    step: Annotated[int, "optimizer steps done"]
    extent: Annotated[Literal["light", "hard"], "kind of reclamation"]
    released_bytes: Annotated[int | None, "GPU memory that PyTorch returned to the driver; null: unknown"] = None
    demoted_bytes: Annotated[int | None, "managed memory moved from the GPU to main memory; null: unknown"] = None
    duration_ms: Annotated[float, "how long training was paused"] = 0.0
    reason: Annotated[str, "reason for the reclamation"] = ""


@dataclass(frozen=True, kw_only=True)
class OverflowArenaChanged(Event):
    """The overflow arena came into use, reached a new maximum, or is empty again."""

    step: Annotated[int, "optimizer steps done"]
    before_bytes: Annotated[int, "maximum in use during the previous step"]
    after_bytes: Annotated[int, "maximum in use during this step, according to PyTorch's counters"]
    reason: Annotated[str, "reason for the change"] = ""


@dataclass(frozen=True, kw_only=True)
class LookAheadChanged(Event):
    """The number of batches that are moved to the GPU ahead of their step changed."""

    step: Annotated[int, "optimizer steps done"]
    before: Annotated[int, "batches ahead until now"]
    after: Annotated[int, "batches ahead from now on"]
    reason: Annotated[str, "reason for the change"] = ""


@dataclass(frozen=True, kw_only=True)
class MemorySampled(Event):
    """Memory in use at a step boundary, and the counters of the unified-memory layer and the caches. Written at a
    process's first log step, at the first log step after an event that changes memory use, at the first log step that
    is 30 seconds or more after the previous sample, and at the end."""

    step: Annotated[int, "optimizer steps done"]
    used_bytes: Annotated[
        Mapping[str, Mapping[str, int]], "tier (device, host, arena) -> owner (weights, ...) -> bytes"
    ]
    capacity_bytes: Annotated[
        Mapping[str, int],
        "size of each tier, where it is known: what this process may use of the GPU, main memory or overflow arena",
    ] = field(default_factory=dict)
    counters: Annotated[
        Mapping[str, float], "dotted names: uvm.stage, uvm.prefetch_wait_ms, cache.latents.hit_rate, ..."
    ] = field(default_factory=dict)
    unavailable: Annotated[Mapping[str, str], "counter that this machine does not provide -> reason"] = field(
        default_factory=dict
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(Event):
    """A checkpoint is complete and on disk."""

    step: Annotated[int, "optimizer steps done when it was made"]
    path: Annotated[str, "relative to the run's folder"]
    size_bytes: Annotated[int, "total size of its files"]
    snapshot_ms: Annotated[float, "how long training was paused"]
    write_ms: Annotated[float, "how long the write took in the background"]
    removed: Annotated[tuple[str, ...], "older checkpoints deleted afterwards"] = ()


@dataclass(frozen=True, kw_only=True)
class SampleFile:
    """One file that a validation generated."""

    path: Annotated[str, "relative to the run's folder"]
    kind: Annotated[Literal["image", "video", "audio"], "medium"]
    prompt: Annotated[str, "prompt it was generated from"] = ""
    seed: Annotated[int | None, "seed of its noise"] = None


@dataclass(frozen=True, kw_only=True)
class ValidationDone(Event):
    """A validation generated samples."""

    step: Annotated[int, "optimizer steps done"]
    files: Annotated[tuple[SampleFile, ...], "generated files, in the order of the prompts"]
    sheet: Annotated[str | None, "contact sheet, relative to the run's folder"] = None
    duration_s: Annotated[float, "duration of the validation"] = 0.0
    requested: Annotated[bool, "requested by the user, not by the schedule"] = False


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss(Event):
    """The loss on held-out samples, which are never trained on, at fixed noise levels."""

    step: Annotated[int, "optimizer steps done"]
    stage: Annotated[str, "expert evaluated; empty if the model has one denoiser"] = ""
    losses: Annotated[Mapping[str, float], "noise level -> mean loss"] = field(default_factory=dict)
    mean: Annotated[float, "mean over all noise levels"]


@dataclass(frozen=True, kw_only=True)
class SelfChecked(Event):
    """A check that training has an effect. It runs for each expert after its first three applied steps, and for the
    first file that the expert is saved to."""

    step: Annotated[int, "optimizer steps done"]
    expert: Annotated[str, "expert checked; empty if the model has one denoiser"] = ""
    layers: Annotated[int, "number of adapted layers; for a full fine-tune: of trained tensors"] = 0
    idle: Annotated[tuple[str, ...], "layers that have learned nothing"] = ()
    change: Annotated[
        float | None,
        "change of the denoiser's output by the adapter, relative to the base model's output; null: a file, or a full "
        "fine-tune",
    ] = None
    amplified: Annotated[float, "adapter strength at which change was measured, relative to that of training"] = 1.0
    file: Annotated[str, "file read back, relative to the run's folder; empty: the model itself was checked"] = ""
    file_difference: Annotated[
        float | None,
        "difference between the file's values and the trained ones, relative to their size; for a full fine-tune: the "
        "largest of the tensors compared",
    ] = None


@dataclass(frozen=True, kw_only=True)
class RequestServed(Event):
    """A request to the running job was read. It is carried out before the next step begins."""

    request: Annotated[Literal["validate", "save", "stop"], "what was requested"]
    step: Annotated[int, "optimizer steps done"]
    source: Annotated[str, "command, studio, file (created in another way), or the name of a signal"] = ""


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Something the user should know that did not stop the run."""

    message: Annotated[str, "the warning, with what to type where that helps"]
    step: Annotated[int | None, "optimizer steps done; null: before or outside training"] = None


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """The run ended. A killed run has no such event. If a run loses its first process, another process writes it."""

    step: Annotated[int, "optimizer steps done"]
    outcome: Annotated[Literal["finished", "interrupted", "failed"], "how the run ended"]
    reason: Annotated[str, "why it was interrupted or failed"] = ""
    duration_s: Annotated[float, "duration of this process, from its RunStarted"] = 0.0
    outputs: Annotated[tuple[str, ...], "resulting files, relative to the run's folder"] = ()
    how_to_load: Annotated[
        Mapping[str, str], "program -> how to load the result; empty: the report reads the files"
    ] = field(default_factory=dict)


EVENTS: tuple[type[Event], ...] = (
    RunStarted,
    Planned,
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
    RequestServed,
    Warned,
    RunEnded,
)

PARTS: tuple[type[Any], ...] = (SampleFile, PlannedTier, PlannedMemory, PlannedChange)
"""What events consist of."""


@dataclass(frozen=True)
class Record:
    """An event and when it happened."""

    time_s: float
    """Seconds since 1970, UTC."""
    event: Event


def step_of(event: Event) -> int | None:
    """The optimizer steps done at this event; None for events outside training."""
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
            | RequestServed(step=step)
            | Warned(step=step)
            | RunEnded(step=step)
        ):
            return step
    return None
