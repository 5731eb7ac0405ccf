"""Capture a baseline: a short, real training run of a config in a temporary folder, and its cost.

baseline/<name>-<date>/
  baseline.json          see `baselines.baseline`; docs/baselines.md
  baseline_report.txt    the same as readable text
  nvidia_smi.log         the output of nvidia-smi, once per second, if there is one
The folder is written atomically, and the config's own output folder is not touched.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import xxhash

from gracetune.baselines.baseline import FILE, REPORT, Baseline, Hardware, Memory, Probe, Steps, throughput
from gracetune.baselines.machine_probe import SmiLog, measure_probe, merge_probes
from gracetune.baselines.rendering import report
from gracetune.config.environment import ALLOCATOR_VARIABLES, GH200_PREFIX, HINTS_VARIABLE, Environment
from gracetune.config.native import shareable
from gracetune.config.run_config import RunConfig, Schedule, Validation
from gracetune.errors import ConfigError, GracetuneError, Problem
from gracetune.hardware import Machine, probe
from gracetune.memory.unified_memory import UnifiedMemory
from gracetune.storage.atomic import publish_folder, write_new
from gracetune.storage.locks import lock
from gracetune.telemetry.events import Event, MemorySampled, RunStarted, StepDone
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.train.logs import EVENTS
from gracetune.train.output import RunFolder
from gracetune.train.run import Result, RunOptions, train
from gracetune.train.view import View

_STEERING = (
    *ALLOCATOR_VARIABLES, HINTS_VARIABLE, "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
)  # fmt: skip
"""Environment variables that affect speed or memory."""
_TEMPORARY = re.compile(r"\.gracetune-baseline-[0-9a-f]{32}\.tmp")
_NOT_THE_WORK = ("name", "output_dir", "schedule", "validation", "checkpoints", "logging")
"""Config sections that a capture sets itself, or that only name the output."""


class BaselineCaptureError(GracetuneError):
    """The run ended early, so there is no baseline to keep."""


@dataclass(frozen=True)
class CaptureOptions:
    """Options of a capture that are not part of the config."""

    steps: int
    output: Path
    """The folder for baselines."""
    use_caches: bool = False
    """Use the config's own caches instead of building temporary ones."""
    allow_misfit: bool = False
    command: str = ""
    git_commit: str | None = None


@dataclass(frozen=True)
class CaptureResult:
    folder: Path
    baseline: Baseline


def warm_up_steps(steps: int) -> int:
    """Steps to leave out of the measurement, while kernels are chosen and caches and clocks warm up."""
    return min(10, steps // 4)


def capture(
    config: RunConfig, options: CaptureOptions, *, environment: Environment, view: View,
    on_memory: Callable[[UnifiedMemory], None] = lambda memory: None,
) -> CaptureResult:  # fmt: skip
    _reject_several_processes(environment)
    machine = probe()
    with _temporary_folder(options.output) as folder:
        measured = measured_config(config, folder / "run", options)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        smi = SmiLog(folder, environment)
        before = measure_probe(device)
        smi.start()
        try:
            result = _train_run(measured, options, environment, view, on_memory)
        finally:
            smi_lines = smi.stop()
        assert result.first_batch is not None, "in a new folder the run starts at step 0"
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        probed = merge_probes(before, measure_probe(device))
        observed = _Observations(
            _events(measured), result.first_batch.once_ms / 1000, peak, probed, smi_lines, tuple(view.warnings)
        )
        baseline = _baseline(measured, options, machine, environment, observed)
        shutil.rmtree(folder / "run")
        write_new(folder / FILE, [baseline.to_json().encode()])
        write_new(folder / REPORT, [report(baseline).encode()])
        final = _new_path(options.output, config.name, baseline.date)
        publish_folder(folder, final)
    return CaptureResult(final, baseline)


def measured_config(config: RunConfig, run_folder: Path, options: CaptureOptions) -> RunConfig:
    """The config with the same work in every step, but our own output folder and nothing between steps."""
    own = config.cache.cache_dir or str(RunFolder.of(config).path / "cache")
    places = {"cache_dir": own} if options.use_caches else dict.fromkeys(_CACHE_PLACES)
    datasets = config.datasets
    if not options.use_caches:
        datasets = tuple(dataset.model_copy(update={"cache_dir": None}) for dataset in datasets)
    training = config.training.model_copy(update={"max_steps": options.steps, "epochs": None})
    saving = {"every_steps": None, "every_epochs": None, "resume": "none"}
    logging = {"every_steps": 1, "trackers": (), "webhook": None}
    return config.model_copy(
        update={
            "output_dir": str(run_folder),
            "training": training,
            "schedule": Schedule(),  # the rate does not affect speed, and a warm-up may be longer than the capture
            "datasets": datasets,
            "cache": config.cache.model_copy(update=places),
            "validation": Validation(enabled=False),
            "checkpoints": config.checkpoints.model_copy(update=saving),
            "logging": config.logging.model_copy(update=logging),
        }
    )


_CACHE_PLACES = ("cache_dir", "text_cache_dir", "vae_cache_dir")


def _reject_several_processes(environment: Environment) -> None:
    count = environment.get("WORLD_SIZE")
    if count not in (None, "", "1"):
        found = f"{count} processes"
        raise ConfigError(
            [Problem("WORLD_SIZE", found, "one process", "gracetune baseline capture CONFIG, unlaunched")]
        )


def _train_run(
    config: RunConfig, capture_options: CaptureOptions, environment: Environment, view: View,
    on_memory: Callable[[UnifiedMemory], None],
) -> Result:  # fmt: skip
    options = RunOptions(
        resume="none", allow_misfit=capture_options.allow_misfit, report=False
    )  # its folder is removed
    result = train(config, environment=environment, options=options, view=view, on_memory=on_memory)
    if result.stop is None or result.stop.kind != "finished" or result.step < capture_options.steps:
        why = "it ended early" if result.stop is None else result.stop.reason
        raise BaselineCaptureError(
            f"the run ended at step {result.step} of {capture_options.steps} ({why}): nothing is kept. "
            "Type the same command again"
        )
    return result


def _events(config: RunConfig) -> list[Event]:
    log = read_log(Path(config.output_dir) / "logs" / EVENTS)
    return [record.event for record in log.merged()]


# -- the result --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Observations:
    """What one capture observed."""

    events: Sequence[Event]
    once_s: float
    peak_bytes: int | None
    """The peak of torch's memory counter; None without a GPU."""
    probe: Probe
    nvidia_smi: str
    warnings: tuple[str, ...]


def _baseline(
    config: RunConfig, options: CaptureOptions, machine: Machine, environment: Environment, observed: _Observations
) -> Baseline:  # fmt: skip
    done = [event for event in observed.events if isinstance(event, StepDone)]
    sampled = [event for event in observed.events if isinstance(event, MemorySampled)]
    started = next(event for event in observed.events if isinstance(event, RunStarted))
    steps = _steps(done)
    described = described_config(config)
    return Baseline(
        name=config.name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=options.command,
        git_commit=options.git_commit,
        versions=_versions(started, machine),
        environment=_variables(environment),
        hardware=hardware_of(machine),
        machine=machine.model_dump(mode="json"),
        device="cpu" if observed.peak_bytes is None else "cuda",
        config_fingerprint=_digest(described),
        config=described,
        steps=steps,
        throughput_samples_per_s=throughput(steps),
        compile_s=observed.once_s,
        duration_s=sum(event.step_ms for event in done) / 1000,
        memory=_memory(sampled, observed.peak_bytes),
        counters=sampled[-1].counters,
        unavailable=sampled[-1].unavailable,
        final_losses={event.stage: event.loss for event in done},
        probe=observed.probe,
        nvidia_smi=observed.nvidia_smi,
        notes=(*observed.warnings, *_uneven(steps)),
    )


def _steps(done: Sequence[StepDone]) -> Steps:
    samples = [after.samples - before for before, after in zip((0, *(one.samples for one in done)), done, strict=False)]
    first = warm_up_steps(len(done))
    return Steps(
        warm_up=first,
        ms=tuple(max(event.step_ms, 1e-6) for event in done[first:]),
        samples=tuple(samples[first:]),
        data_wait_ms=tuple(event.data_wait_ms for event in done[first:]),
    )


def _uneven(steps: Steps) -> tuple[str, ...]:
    least, most = min(steps.samples), max(steps.samples)
    return () if least == most else (f"steps of {least} to {most} samples: a batch ramp, or batches cut short",)


def _memory(sampled: Sequence[MemorySampled], torch_peak: int | None) -> Memory:
    """Peak memory by tier.

    Samples are taken at step boundaries. torch also counts the peak inside steps, on the device only.
    """
    tiers = dict.fromkeys(tier for event in sampled for tier in event.used_bytes)
    fullest = {
        tier: max((event.used_bytes.get(tier, {}) for event in sampled), key=lambda held: sum(held.values()))
        for tier in tiers
    }
    peaks = {tier: sum(held.values()) for tier, held in fullest.items()}
    if torch_peak is not None:
        peaks["device"] = max(peaks.get("device", 0), torch_peak)
    return Memory(peak_bytes=peaks, owners_bytes=fullest)


def _versions(started: RunStarted, machine: Machine) -> dict[str, str]:
    more = {"cuda": machine.software.torch_cuda, "driver": machine.host.nvidia_kernel_driver}
    return {**started.versions, **{name: version for name, version in more.items() if version is not None}}


def _variables(environment: Environment) -> dict[str, str]:
    """Only the variables that affect speed or memory; others may hold secrets."""
    found = environment.variables
    names = [name for name in sorted(found) if name in _STEERING or name.startswith(GH200_PREFIX)]
    return {name: found[name] for name in names}


def hardware_of(machine: Machine) -> Hardware:
    return Hardware(
        gpus=tuple(gpu.name or "an unnamed GPU" for gpu in machine.gpus),
        cpu=machine.host.cpu_model,
        cores=machine.host.cpu_count,
        threads=torch.get_num_threads(),
        profile=machine.profile.value,
    )


def described_config(config: RunConfig) -> dict[str, Any]:
    """The settings that decide the work of a step, by dotted key."""
    values = {name: value for name, value in shareable(config).items() if name not in _NOT_THE_WORK}
    flat = dict(_flat("", values))
    left_out = {"training.max_steps", "training.epochs", *(f"cache.{name}" for name in _CACHE_PLACES)}
    return {key: value for key, value in flat.items() if key not in left_out and not key.endswith("].cache_dir")}


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}" if key else str(name), inner)
    elif isinstance(value, list) and value and all(isinstance(inner, Mapping) for inner in value):
        for number, inner in enumerate(value):
            yield from _flat(f"{key}[{number}]", inner)
    else:
        yield key, value


def _digest(described: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())


# -- the folder --------------------------------------------------------------------------------------------------------


@contextmanager
def _temporary_folder(output: Path) -> Iterator[Path]:
    """A folder that is removed at the end unless it was renamed.

    It stays locked during the capture, so that the next capture removes only folders that killed ones left behind.
    """
    folder = output / f".gracetune-baseline-{secrets.token_hex(16)}.tmp"
    try:
        folder.mkdir(parents=True)
        held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        lock(held, exclusive=True)
        _sweep(output)
    except OSError as error:
        found = f"{output}: {error.strerror or error}"
        raise ConfigError([Problem("--output", found, "a folder we may write to", "--output FOLDER")]) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _sweep(output: Path) -> None:
    """Remove the folders of killed captures.

    An empty folder may belong to a capture that is about to lock it. Without working locks nothing is removed.
    """
    for path in output.iterdir():
        if not _TEMPORARY.fullmatch(path.name) or path.is_symlink() or not any(path.iterdir()):
            continue
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if lock(descriptor, exclusive=True) == "held":
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _new_path(output: Path, name: str, date: str) -> Path:
    """A new folder `NAME-DATE`, numbered if it exists."""
    plain = re.sub(r"[^\w.-]+", "_", name).strip(".") or "run"
    stem = f"{plain}-{re.sub(r'[^0-9T]', '', date.partition('+')[0])}"
    number = 1
    while (output / (stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return output / (stem if number == 1 else f"{stem}-{number}")
