"""A small complete SimpleTuner config, and ways to read variations of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gracetune.config import Environment, Resolved, load
from gracetune.errors import ConfigError, Problem

EMPTY = Environment({})
GOOD: dict[str, Any] = {
    "model_family": "wan",
    "model_flavour": "t2v-480p-14b-2.1",
    "model_type": "lora",
    "output_dir": "output/run",
    "optimizer": "adamw_bf16",
    "max_train_steps": 100,
    "num_train_epochs": 0,
    "data_backend_config": "datasets.json",
}
DATASETS: list[dict[str, Any]] = [
    {"id": "clips", "type": "local", "dataset_type": "video", "instance_data_dir": "data/clips",
     "caption_strategy": "textfile", "video": {"num_frames": 81}},
    {"id": "texts", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache/text/{model_family}"},
]  # fmt: skip
IMAGES: list[dict[str, Any]] = [{"id": "stills", "instance_data_dir": "data/stills", "caption_strategy": "textfile"}]
LYCORIS: dict[str, Any] = {
    "algo": "lokr",
    "multiplier": 1.0,
    "linear_dim": 16,
    "linear_alpha": 8,
    "factor": 4,
    "apply_preset": {"target_module": ["Attention"], "module_algo_map": {"Attention": {"factor": 4}}},
}


def write(folder: Path, name: str, data: Any) -> Path:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def resolve(folder: Path, changes: dict[str, Any] | None = None, *, datasets: Any = None, **options: Any) -> Resolved:
    """GOOD with changes; a change to `...` takes the key away."""
    config = {key: value for key, value in {**GOOD, **(changes or {})}.items() if value is not ...}
    if not (folder / "datasets.json").exists() or datasets is not None:
        write(folder, "datasets.json", DATASETS if datasets is None else datasets)
    path = write(folder, "config.json", config)
    return load(path, environment=options.pop("environment", EMPTY), **options)


def problems(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        resolve(folder, changes, **options)
    return {problem.key: problem for problem in caught.value.problems}
