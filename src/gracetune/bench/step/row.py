"""One measured row: the format of `--json`, of committed results, and the source of the documentation's table."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final

from gracetune.units import GIB

ROW_KEYS: Final = (
    "bench", "adapter", "precision", "batch", "resolution", "frames", "checkpointing", "ms_per_step", "tokens_per_s",
    "tflops", "gemm_ceiling_tflops", "peak_gib", "estimated_peak_gib", "compile_s", "baseline_ms", "ratio",
    "samples_ms", "smoke", "gpu", "git_commit", "command", "versions",
)  # fmt: skip
"""Keys that are always present, in this order; others follow."""


@dataclass(frozen=True)
class TargetBar:
    """The result that one row has to reach (`must_`), and the goal beyond it (`aim_`). Ratios are relative to the
    baseline of the same run."""

    must_ms: float | None = None
    aim_ms: float | None = None
    must_ratio: float | None = None
    aim_ratio: float | None = None
    max_slowdown: float | None = None
    """Allowed slowdown relative to the row named `than`, as a share."""
    than: str | None = None

    def words(self) -> str:
        parts = []
        if self.must_ms is not None:
            parts.append(f"<= {self.must_ms:g} ms")
        if self.must_ratio is not None:
            parts.append(f">= {self.must_ratio:g}x")
        if self.max_slowdown is not None:
            parts.append(f"<= {self.max_slowdown:+.0%} against {self.than}")
        return ", ".join(parts)


@dataclass(frozen=True)
class StepRow:
    """One row. Values are None if unknown: without a GPU, a baseline, or a plan for these weights."""

    bench: str
    adapter: str
    precision: str
    batch: int
    resolution: int | str
    frames: int
    checkpointing: str
    """The requested setting."""
    ms_per_step: float
    """The median of `samples_ms`."""
    tokens_per_s: float
    tflops: float
    """Model TFLOP/s."""
    gemm_ceiling_tflops: float
    """TFLOP/s of one product of the model's main shape in the row's precision, measured in the same run."""
    peak_gib: float | None
    estimated_peak_gib: float | None
    compile_s: float
    """Duration of the first step minus that of an ordinary one."""
    baseline_ms: float | None
    """Milliseconds of a step of the plain loop."""
    ratio: float | None
    """`baseline_ms / ms_per_step`: above 1, ours is faster."""
    samples_ms: tuple[float, ...]
    """Milliseconds of each timed step."""
    smoke: bool
    gpu: str | None
    git_commit: str | None
    command: str
    versions: dict[str, Any]
    name: str = ""
    """Name of the row in a suite."""
    optimizer: str = "adamw"
    memory_limit_gib: float | None = None
    policy: str = "off"
    """The policy that `checkpointing` resolved to: off, half (the compiler's activation budget) or full."""
    model_flops: int = 0
    hardware_flops: int | None = 0
    model_utilisation: float = 0.0
    """Share of the ceiling."""
    hardware_utilisation: float | None = None
    """The same including recomputation; None if the recomputed share is unknown."""
    gemm_shape: str = ""
    gemm_ceilings_tflops: dict[str, float] = field(default_factory=dict)
    trained_parameters: int = 0
    baseline: str | None = None
    """Description of the baseline."""
    baseline_samples_ms: tuple[float, ...] = ()
    baseline_peak_gib: float | None = None
    loss: float = 0.0
    """Loss of the last step, to show that it is finite."""
    numerics: dict[str, float] | None = None
    self_check_s: float | None = None
    """Seconds of the self-check of the adapter and its first file, once per run."""
    joules_per_step: float | None = None
    """Energy of the GPU, the mean of the timed steps; None if it is unknown."""
    clock_mhz: int | None = None
    """Clock of the GPU's multiprocessors at the end of the timed steps."""
    baseline_joules_per_step: float | None = None
    token_routing: float = 0.0
    """Share of tokens that skip blocks. `tokens_per_s` counts all tokens, `model_flops` only computed ones."""
    unrouted_ms: float | None = None
    """Milliseconds of a step with all tokens, measured in the same run."""
    reasons: tuple[str, ...] = ()
    bar: str = ""
    ok: bool | None = None
    """Whether the row meets its bar, memory limit and estimated peak; None without a bar or in a smoke test."""


assert tuple(one.name for one in fields(StepRow))[: len(ROW_KEYS)] == ROW_KEYS


def gib(count: int | None) -> float | None:
    return None if count is None else round(count / GIB, 3)
