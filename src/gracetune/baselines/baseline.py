"""A baseline: the cost of a short run on one machine, stored to be compared with a later one.

`baseline.json` contains one `Baseline` of this module; docs/baselines.md describes it. New fields keep the version,
since readers ignore unknown ones. Any other change raises `VERSION`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.schema import plain

FORMAT: Final = "gracetune-baseline"
VERSION: Final = 1
FILE = "baseline.json"
REPORT = "baseline_report.txt"
SMI_LOG = "nvidia_smi.log"
MOST_STEPS = 2000
"""Most steps of a capture; a comparison looks at every pair of steps."""

Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Hardware(_Part):
    """The facts that must be equal for two machines to count as the same; None means unknown."""

    gpus: tuple[str, ...] = ()
    cpu: str | None = None
    cores: int | None = None
    """CPUs that the run could use."""
    threads: int | None = None
    """Threads that torch used on the CPU."""
    profile: str = ""

    def differences(self, other: Hardware) -> tuple[str, ...]:
        mine, theirs = self.model_dump(), other.model_dump()
        return tuple(
            f"{name}: {_quoted(mine[name])} -> {_quoted(theirs[name])}" for name in mine if mine[name] != theirs[name]
        )


def _quoted(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return "unknown" if value is None else str(value)


class Probe(_Part):
    """Times of a fixed small workload, measured in the same capture.

    Comparisons between machines use them as the unit of time.
    """

    what: str
    gemm_ms: Annotated[tuple[Milliseconds, ...], Field(min_length=1)]
    copy_ms: Annotated[tuple[Milliseconds, ...], Field(min_length=1)]


class Steps(_Part):
    """Measured optimizer steps in order, one entry per step."""

    warm_up: Count
    """Steps before them, which are not measured."""
    ms: Annotated[tuple[Milliseconds, ...], Field(min_length=1, max_length=MOST_STEPS)]
    samples: tuple[Positive, ...]
    """Samples of each step, not a running total."""
    data_wait_ms: tuple[float, ...]

    @model_validator(mode="after")
    def _equal_lengths(self) -> Self:
        if not len(self.ms) == len(self.samples) == len(self.data_wait_ms):
            raise ValueError("ms, samples and data_wait_ms are not equally long")
        return self


class Memory(_Part):
    """Peak memory in training, by tier (device, host)."""

    peak_bytes: Mapping[str, Count]
    owners_bytes: Mapping[str, Mapping[str, Count]]
    """Bytes by owner at the step boundary with the highest use; memory without a known owner is `other`."""


class Baseline(_Part):
    format: Literal["gracetune-baseline"] = FORMAT
    version: Literal[1] = VERSION
    name: str
    date: str
    """UTC, ISO 8601."""
    command: str = ""
    git_commit: str | None = None
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    """Environment variables that affect speed or memory, if set."""
    hardware: Hardware
    machine: Mapping[str, Any]
    """The whole machine report, as under `machine` in `gracetune doctor --json`."""
    device: str
    """The training device: cuda or cpu."""
    config_fingerprint: str
    config: Mapping[str, Any]
    """The config by dotted key, without names and output folders."""
    steps: Steps
    throughput_samples_per_s: float
    compile_s: float
    """One-time work in the first batch, such as compiling."""
    duration_s: float
    """Duration of all optimizer steps, including the warm-up."""
    memory: Memory
    counters: Mapping[str, float]
    """Counters of caches, look-ahead and unified memory at the last step."""
    unavailable: Mapping[str, str]
    """Measurements that this machine does not offer -> why."""
    final_losses: Mapping[str, float]
    """Last losses by noise expert; the key is "" for models with a single denoiser."""
    probe: Probe
    nvidia_smi: str
    """Name of the log file, or `not available: why`."""
    notes: tuple[str, ...] = ()

    @property
    def step_ms(self) -> float:
        return median(self.steps.ms)

    @property
    def gemm_ms(self) -> float:
        return median(self.probe.gemm_ms)

    def to_json(self) -> str:
        return json.dumps(plain(self.model_dump(mode="python")), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def throughput(steps: Steps) -> float:
    """Samples per second over all measured steps."""
    return 1000 * sum(steps.samples) / sum(steps.ms)


def config_differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> tuple[str, ...]:
    """The dotted keys whose values differ, with both values."""
    keys = sorted({*one, *two})
    return tuple(f"{key}: {one.get(key)!r} -> {two.get(key)!r}" for key in keys if one.get(key) != two.get(key))


# -- reading -----------------------------------------------------------------------------------------------------------


def read_baseline(path: Path) -> Baseline:
    """Read a baseline from its folder or JSON file. TelemetryError if there is none that this release can read."""
    file = path / FILE if path.is_dir() else path
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        found = f"no {FILE} in this folder" if path.is_dir() and not file.exists() else error.strerror or str(error)
        raise _unreadable(path, found) from None
    except UnicodeDecodeError:
        raise _unreadable(path, "a file that is no text") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        cut = "empty" if not text.strip() else f"no JSON, cut off or changed: {error}"
        raise _unreadable(path, cut, hint="capture it again: gracetune baseline capture CONFIG") from None
    return _parsed(path, value)


def _parsed(path: Path, value: Any) -> Baseline:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _unreadable(path, "JSON, but no baseline")
    if value.get("version") != VERSION or isinstance(value.get("version"), bool):
        raise _unreadable(
            path,
            f"a baseline of version {value.get('version')!r}",
            expected=f"version {VERSION}, which this release reads",
            hint="capture both with the same release: gracetune baseline capture CONFIG",
        )
    try:
        return Baseline.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"]) or "the whole"
        again = "capture it again: gracetune baseline capture CONFIG"
        raise _unreadable(
            path, f"{location}: {first['msg']}", expected="what docs/baselines.md says", hint=again
        ) from None


def _unreadable(path: Path, found: str, *, expected: str | None = None, hint: str | None = None) -> TelemetryError:
    return TelemetryError(
        str(path),
        found=found,
        expected=expected or f"a baseline: a folder with {FILE}, or that file",
        hint=hint or "gracetune baseline capture CONFIG makes one; `ls baseline/` lists those there are",
    )
