"""Complete runs on tiny models: generated data, a config for each family, and the run itself."""

from __future__ import annotations

import io
from collections.abc import Callable
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image

from gracetune.config.environment import Environment
from gracetune.config.run_config import RunConfig
from gracetune.train.run import Result, RunOptions, train
from gracetune.train.view import View

TinyModel = Callable[[str, str], Path]
ALONE = Environment({})

FLAVOURS = {
    "sdxl": "base-1.0",
    "wan": "t2v-14b-2.2",
    "flux": "dev",
    "qwen_image": "t2i",
    "flux2": "klein-base-4b",
    "z_image": "base",
    "krea2": "raw",
    "stable_audio": "open-1.0",
}


def images(folder: Path, count: int = 4, size: int = 64) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (size // 8, size // 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((size, size)).save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(f"picture number {number}")
    return folder


def sounds(folder: Path, count: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        wave = np.random.default_rng(number).uniform(-0.3, 0.3, (44100, 2)).astype(np.float32)
        buffer = io.BytesIO()
        soundfile.write(buffer, wave, 44100, format="WAV")
        (folder / f"{number}.wav").write_bytes(buffer.getvalue())
        (folder / f"{number}.txt").write_text(f"sound number {number}")
    return folder


def config_for(
    family: str, tiny_model: TinyModel, root: Path, *, flavour: str | None = None, **sections: Any
) -> RunConfig:
    """A config in which everything is in float32, because tests compare numbers."""
    flavour = flavour or FLAVOURS[family]
    data = (
        {
            "id": "sounds",
            "path": str(sounds(root / "sounds")),
            "dataset_type": "audio",
            "audio": {"duration_interval": 1.0},
        }
        if family == "stable_audio"
        else {"id": "pictures", "path": str(images(root / "pictures")), "resolution": 64.0}
    )
    values: dict[str, Any] = {
        "name": "tiny",
        "output_dir": str(root / "out"),
        "model": {
            "family": family,
            "flavour": flavour,
            "path": str(tiny_model(family, flavour)),
            "base_precision": "fp32",
        },
        "datasets": [data],
        "adapter": {"kind": "lora", "rank": 4},
        "training": {"max_steps": 5, "mixed_precision": "fp32", "seed": 3},
        "optimizer": {"lr": 1e-3},
        "checkpoints": {"every_steps": None},
        "logging": {"every_steps": 1},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return RunConfig.model_validate(values)


def shrink_references(monkeypatch: pytest.MonkeyPatch, area: int = 64 * 64) -> None:
    """Pipelines for edits scale every reference to a megapixel."""
    kontext = "diffusers.pipelines.flux.pipeline_flux_kontext"
    monkeypatch.setattr(f"{kontext}.PREFERRED_KONTEXT_RESOLUTIONS", [(isqrt(area), isqrt(area))])
    edit = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit.calculate_dimensions"
    full_size = pipeline_qwenimage_edit.calculate_dimensions
    monkeypatch.setattr(edit, lambda _, ratio: full_size(area, ratio))
    plus = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus"
    monkeypatch.setattr(f"{plus}.VAE_IMAGE_SIZE", area)
    monkeypatch.setattr(f"{plus}.CONDITION_IMAGE_SIZE", 2 * area)


def changed(config: RunConfig, section: str, **values: Any) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def run(config: RunConfig, view: View | None = None, **options: Any) -> Result:
    return train(config, environment=ALONE, options=RunOptions(**options), view=view or View())
