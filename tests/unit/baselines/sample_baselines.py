"""Baselines with step times as real machines give them: noise on every step, slow drift, stalls, days that differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gracetune.baselines.baseline import Baseline


@dataclass(frozen=True)
class Noise:
    """Shares of the step time."""

    step: float = 0.02
    """Standard deviation from step to step."""
    drift: float = 0.01
    """Of a slow wander (each step keeps 0.9 of the one before)."""
    stalls: float = 0.05
    """How many steps take half as long again, up to three times as long."""
    run: float = 0.01
    """The whole run is faster or slower by up to this."""

    def times(self, seed: int, steps: int, ms: float) -> tuple[float, ...]:
        generator = np.random.default_rng(seed)
        wander = np.zeros(steps)
        kicks = generator.normal(0, self.drift * np.sqrt(1 - 0.9**2), steps)
        for step in range(steps):
            wander[step] = (0.9 * wander[step - 1] if step else 0.0) + kicks[step]
        logs = wander + generator.normal(0, self.step, steps) + generator.uniform(-self.run, self.run)
        stalled = generator.random(steps) < self.stalls
        factors = np.where(stalled, generator.uniform(1.5, 3.0, steps), 1.0)
        return tuple((ms * np.exp(logs) * factors).tolist())


def baseline(ms: tuple[float, ...] = (100.0,) * 30, **changes: Any) -> Baseline:
    values: dict[str, Any] = {
        "name": "tiny",
        "date": "2026-01-01T00:00:00+00:00",
        "versions": {"torch": "2.13.0"},
        "environment": {},
        "hardware": {"cpu": "a CPU", "cores": 2, "threads": 1, "profile": "cpu"},
        "machine": {},
        "device": "cpu",
        "config_fingerprint": "abc",
        "config": {"model.family": "flux", "training.batch_size": 1},
        "steps": {"warm_up": 10, "ms": ms, "samples": (2,) * len(ms), "data_wait_ms": (0.5,) * len(ms)},
        "throughput_samples_per_s": 2000 * len(ms) / sum(ms),
        "compile_s": 1.0,
        "duration_s": 5.0,
        "memory": {"peak_bytes": {"host": 1 << 30}, "owners_bytes": {"host": {"other": 1 << 30}}},
        "counters": {"cache.latents.hit_rate": 1.0},
        "unavailable": {"uvm.stage": "not open"},
        "final_losses": {"": 0.5},
        "probe": {"what": "a product on cpu", "gemm_ms": (10.0,) * 5, "copy_ms": (5.0,) * 5},
        "nvidia_smi": "not available: no nvidia-smi on the PATH",
    }
    return Baseline.model_validate(values | changes)
