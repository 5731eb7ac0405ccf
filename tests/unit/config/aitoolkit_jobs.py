"""A small ai-toolkit job, ways to change it, and ways to read it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gracetune.config import Environment, Resolved, load
from gracetune.errors import ConfigError, Problem

PROCESS = "config.process[0]."
WAN: dict[str, Any] = {"name_or_path": "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "arch": "wan22_14b"}
FLUX: dict[str, Any] = {"name_or_path": "black-forest-labs/FLUX.1-dev", "arch": "flux"}
SDXL: dict[str, Any] = {"name_or_path": "stabilityai/stable-diffusion-xl-base-1.0", "arch": "sdxl"}
QWEN_EDIT: dict[str, Any] = {"name_or_path": "Qwen/Qwen-Image-Edit-2509", "arch": "qwen_image_edit_plus"}


def job(**sections: Any) -> dict[str, Any]:
    """A complete job. Mappings are laid over the sections they name; None takes a section out."""
    process: dict[str, Any] = {
        "type": "diffusion_trainer",
        "training_folder": "output",
        "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
        "datasets": [{"folder_path": "/data/cats", "resolution": [512]}],
        "train": {"steps": 100, "noise_scheduler": "flowmatch", "dtype": "bf16", "lr": 1e-4},
        "model": copy.deepcopy(WAN),
        "sample": {"sample_every": 50, "prompts": ["a cat"]},
    }
    for name, value in sections.items():
        if value is None:
            process.pop(name, None)
        elif isinstance(value, dict) and isinstance(process.get(name), dict):
            process[name] = {**process[name], **value}
        else:
            process[name] = value
    return {"job": "extension", "config": {"name": "cats", "process": [process]}}


def dataset(**keys: Any) -> list[dict[str, Any]]:
    return [{"folder_path": "/data/cats", "resolution": [512], **keys}]


def write(folder: Path, document: Any, name: str = "job.yaml") -> Path:
    path = folder / name
    text = document if isinstance(document, str) else None
    dump = json.dumps if name.endswith((".json", ".jsonc")) else yaml.safe_dump
    path.write_text(text if text is not None else dump(document), encoding="utf-8")
    return path


def read(folder: Path, document: Any = None, **sections: Any) -> Resolved:
    document = job(**sections) if document is None else document
    return load(write(folder, document), environment=Environment({}))


def problems(folder: Path, document: Any = None, **sections: Any) -> dict[str, Problem]:
    """Every problem by its key below the process."""
    with pytest.raises(ConfigError) as caught:
        read(folder, document, **sections)
    return {problem.key.removeprefix(PROCESS): problem for problem in caught.value.problems}


def only_problem(folder: Path, document: Any = None, **sections: Any) -> Problem:
    found = problems(folder, document, **sections)
    assert len(found) == 1, found
    return next(iter(found.values()))


def note(resolved: Resolved, part: str) -> str:
    """The one note that contains a text."""
    found = [text for text in resolved.notes if part in text]
    assert len(found) == 1, resolved.notes
    return found[0]
