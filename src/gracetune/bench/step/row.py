"""One measured row: what `--json` prints, what is committed, and what the documentation's table is made from."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final

from gracetune.units import GIB

ROW_KEYS: Final = (
    "bench", "adapter", "precision", "batch", "resolution", "frames", "checkpointing", "ms_per_step", "tokens_per_s",
    "tflops", "gemm_ceiling_tflops", "peak_gib", "estimated_peak_gib", "compile_s", "baseline_ms", "ratio",
    "samples_ms", "smoke", "gpu", "git_commit", "command", "versions",
)  # fmt: skip
"""Those every reader may count on, in this order; others follow."""


@dataclass(frozen=True)
class TargetBar:
    """What the project has promised for one row. Ratios are to the baseline of the same run."""

    must_ms: float | None = None
    aim_ms: float | None = None
    must_ratio: float | None = None
    aim_ratio: float | None = None
    must_slower: float | None = None
    """At most this share slower than the row of another name."""
    than: str | None = None

    def words(self) -> str:
        parts = []
        if self.must_ms is not None:
            parts.append(f"<= {self.must_ms:g} ms")
        if self.must_ratio is not None:
            parts.append(f">= {self.must_ratio:g}x")
        if self.must_slower is not None:
            parts.append(f"<= {self.must_slower:+.0%} against {self.than}")
        return ", ".join(parts)


@dataclass(frozen=True)
class StepRow:
    """None where it is unknown here: no GPU, no baseline, no plan for these weights."""

    bench: str
    adapter: str
    precision: str
    batch: int
    resolution: int | str
    frames: int
    checkpointing: str
    """As asked for."""
    ms_per_step: float
    tokens_per_s: float
    tflops: float
    """Model FLOPs a second."""
    gemm_ceiling_tflops: float
    """Of one product of the model's main shape in the row's precision, measured in the same run."""
    peak_gib: float | None
    estimated_peak_gib: float | None
    compile_s: float
    """The first step, less an ordinary one."""
    baseline_ms: float | None
    ratio: float | None
    samples_ms: tuple[float, ...]
    smoke: bool
    gpu: str | None
    git_commit: str | None
    command: str
    versions: dict[str, Any]
    name: str = ""
    """In a suite."""
    optimizer: str = "adamw"
    memory_limit_gib: float | None = None
    policy: str = "off"
    """What `checkpointing` came to: off, half (the compiler's activation budget) or full."""
    model_flops: int = 0
    hardware_flops: int | None = 0
    model_utilisation: float = 0.0
    """Of the ceiling."""
    hardware_utilisation: float | None = None
    """The same with what is computed again; None where only the compiler knows how much that is."""
    gemm_shape: str = ""
    gemm_ceilings_tflops: dict[str, float] = field(default_factory=dict)
    trained_parameters: int = 0
    baseline: str | None = None
    """What the baseline is, in words."""
    baseline_samples_ms: tuple[float, ...] = ()
    baseline_peak_gib: float | None = None
    loss: float = 0.0
    """Of the last step: that it is a number."""
    numerics: dict[str, float] | None = None
    self_check_s: float | None = None
    """The run's self-check of this model's adapter and its first file, which happens once in a run."""
    token_routing: float = 0.0
    """Share of the tokens that skip blocks. `tokens_per_s` counts all tokens, `model_flops` what is computed."""
    unrouted_ms: float | None = None
    """A step with all tokens, measured in the same run."""
    reasons: tuple[str, ...] = ()
    bar: str = ""
    ok: bool | None = None
    """None without a bar, and in a smoke test."""


assert tuple(one.name for one in fields(StepRow))[: len(ROW_KEYS)] == ROW_KEYS


def gib(count: int | None) -> float | None:
    return None if count is None else round(count / GIB, 3)
