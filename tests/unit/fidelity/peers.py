"""What the tests of this folder share: the numbers recorded from the peers' own code, and a config file of a peer with
the settings they were recorded for, read by our reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from gracetune.config.run_config import RunConfig
from gracetune.models.experts import trained_experts
from gracetune.models.fact_overrides import facts_of
from gracetune.models.registry import spec_of
from gracetune.models.source import open_source
from gracetune.models.spec import ModelFacts
from gracetune.train.step import TrainingGoal
from unit.config import aitoolkit_jobs, simpletuner_files

GOLDEN = Path(__file__).parents[2] / "golden" / "fidelity"
SHARES = [0.001, 0.005, 0.01, 0.02, 0.05, *(step / 20 for step in range(2, 19)), 0.95, 0.98, 0.99, 0.995, 0.999]
"""At which quantiles are recorded (`scripts/peer_vectors/common.py`)."""
TinyModel = Callable[[str, str], Path]

ARCHS = {
    "flux": ("black-forest-labs/FLUX.1-dev", "dev"),
    "flux_kontext": ("black-forest-labs/FLUX.1-Kontext-dev", "kontext"),
    "qwen_image": ("Qwen/Qwen-Image", "t2i"),
    "qwen_image_edit": ("Qwen/Qwen-Image-Edit", "edit"),
    "qwen_image_edit_plus": ("Qwen/Qwen-Image-Edit-2509", "edit-2509"),
    "wan21": ("Wan-AI/Wan2.1-T2V-14B-Diffusers", "t2v-14b-2.1"),
    "wan21_i2v": ("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "i2v-14b-480p-2.1"),
    "wan22_5b": ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", "ti2v-5b-2.2"),
    "wan22_14b": ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", "t2v-14b-2.2"),
    "wan22_14b_i2v": ("Wan-AI/Wan2.2-I2V-A14B-Diffusers", "i2v-14b-2.2"),
    "sdxl": ("stabilityai/stable-diffusion-xl-base-1.0", "base-1.0"),
}
"""ai-toolkit's arch -> weights of it, and what we call them."""
FLAVOURS = {"flux": "dev", "qwen_image": "v1.0", "wan": "t2v-480p-14b-2.1", "sdxl": "base-1.0"}
"""SimpleTuner's `model_family` -> a `model_flavour` of it."""


def recorded(peer: str, topic: str) -> list[dict[str, Any]]:
    document = json.loads((GOLDEN / peer / f"{topic}.json").read_text(encoding="utf-8"))
    values: list[dict[str, Any]] = document["values"]
    return values


def case_name(case: dict[str, Any]) -> str:
    """For a test's id."""
    settings = {**case.get("train", {}), **case.get("options", {}), **case.get("ema_config", {})}
    location = [str(case[key]) for key in ("arch", "family", "expert", "batch") if key in case]
    size = ["x".join(map(str, case["size"][1:]))] if "size" in case else []
    return "-".join([*location, *size, *(f"{name}={value}" for name, value in settings.items())]).replace(" ", "")


def aitoolkit_config(folder: Path, train: dict[str, Any], arch: str = "flux") -> RunConfig:
    """Of a job with these keys in its `train` block."""
    weights, _ = ARCHS[arch]
    wide = {"noise_scheduler": "flowmatch", "steps": 100, "lr": 1e-4, "dtype": "bf16"}
    model = {"name_or_path": weights, "arch": arch}
    control = {"control_path": "/data/before"} if "edit" in arch or "kontext" in arch else {}
    entries = aitoolkit_jobs.dataset(**control)
    document = aitoolkit_jobs.job(model=model, train={**wide, **train}, datasets=entries, sample=None)
    return aitoolkit_jobs.read(folder, document).config


def simpletuner_config(folder: Path, options: dict[str, Any], family: str = "flux") -> RunConfig:
    """Of a config with these options."""
    given = {"model_family": family, "model_flavour": FLAVOURS[family], "train_batch_size": 1, **options}
    return simpletuner_files.resolve(folder, given, datasets=simpletuner_files.IMAGES).config


def facts_for(config: RunConfig, tiny_model: TinyModel) -> ModelFacts:
    """Of a tiny model with the published weights' own scheduler."""
    assert config.model.flavour is not None
    path = tiny_model(config.model.family, config.model.flavour)
    tiny = config.model_copy(update={"model": config.model.model_copy(update={"path": str(path), "vae_path": None})})
    return facts_of(tiny, spec_of(config.model.family), open_source(tiny.model))


def goal_of(config: RunConfig, tiny_model: TinyModel) -> tuple[TrainingGoal, ModelFacts]:
    """What a run with this config learns."""
    facts = facts_for(config, tiny_model)
    return TrainingGoal.from_config(config.objective, facts, trained_experts(config.model.experts, facts)), facts


def tokens_of(size: list[int]) -> int:
    """Of latents [C, H, W] or [C, F, H, W], as a training step counts them."""
    latents = 1
    for side in size[1:]:
        latents *= side
    return latents // 4


STEP = 0.0011
"""Peers learn at one of 1000 levels. Levels one step apart count as equal."""


def distance(levels: list[float], quantiles: list[float]) -> float:
    """Kolmogorov and Smirnov's distance between our levels, which are quantiles at `SHARES`, and the peer's: the
    largest difference of the shares of samples below a level."""
    points = [(0.0, min(0.0, quantiles[0])), *zip(SHARES, quantiles, strict=True), (1.0, max(1.0, quantiles[-1]))]
    furthest = 0.0
    for share, level in zip(SHARES, levels, strict=True):
        low, high = (_share_below(level + step, points) for step in (-STEP, STEP))
        furthest = max(furthest, low - share, share - high)
    return furthest


def _share_below(level: float, points: list[tuple[float, float]]) -> float:
    """The peer's, between two of its quantiles by a straight line."""
    for (share, quantile), (next_share, next_quantile) in pairwise(points):
        if quantile <= level < next_quantile:
            return share + (next_share - share) * (level - quantile) / (next_quantile - quantile)
    return 0.0 if level < points[0][1] else 1.0
