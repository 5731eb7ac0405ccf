"""The published examples through the real trainer, each made small: other weights, images and sizes, all else as it
stands in the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from gracetune.config import Environment, load
from gracetune.config.run_config import RunConfig
from runs.launched import ROOT
from runs.made_runs import TinyModel, images, shrink_references
from runs.test_commands import gracetune

EXAMPLES = [
    ("gh200_in_memory.json", "flux", "dev", {}),
    ("gh200_caches_and_ramp.json", "qwen_image", "edit-2509", {}),
    ("gh200_large_batch.json", None, None, {"model.vae_path": None}),
    # bitsandbytes works on GPUs alone, and a run on a CPU reports it.
    ("qwen_image_edit_2509.yaml", "qwen_image", "edit-2509", {"optimizer.name": "adamw"}),
    # Its assistant is on the hub; tests/runs/test_assistant.py trains Turbo under one.
    ("z_image_turbo.yaml", "z_image", "base", {"model.flavour": "base", "model.assistant_adapter": None}),
    ("krea2_raw.yaml", "krea2", "raw", {}),
    ("wan22_dual_expert_lokr.yaml", "wan", "t2v-14b-2.2", {}),
]


@pytest.fixture
def small_references(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_references(monkeypatch)


def smaller(config: RunConfig, tiny: Path, folder: Path) -> dict[str, Any]:
    """The settings that make the example run here."""
    values: dict[str, Any] = {
        "model.path": str(tiny),
        "output_dir": str(folder / "out"),
        "schedule.warmup_steps": min(1, config.schedule.warmup_steps),
        "validation.every_steps": 2,
        "validation.width": 64,
        "validation.height": 64,
        "validation.steps": 2,
    }
    for number, dataset in enumerate(config.datasets):
        key = f"datasets[{dataset.id}]"
        values[f"{key}.path"] = str(images(folder / "data" / f"{number}", 4))
        values |= {f"{key}.resolution": 64.0, f"{key}.resolution_type": "pixel", f"{key}.minimum_size": 0.0}
        if dataset.dataset_type == "video":
            values[f"{key}.dataset_type"] = "image"
    for number, prompt in enumerate(config.validation.prompts):
        shown = [str(folder / "data" / "0" / "00.png")] * len(prompt.references)
        values |= {f"validation.prompts[{number}].references": shown}
        values |= {f"validation.prompts[{number}].{name}": 64 for name in ("width", "height")}
        values |= {f"validation.prompts[{number}].num_frames": 1, f"validation.prompts[{number}].steps": 2}
    return values


@pytest.mark.full
@pytest.mark.usefixtures("small_references")
@pytest.mark.parametrize(("name", "family", "flavour", "more"), EXAMPLES, ids=[one[0] for one in EXAMPLES])
def test_an_example_trains(
    name: str, family: str | None, flavour: str | None, more: dict[str, Any], tiny_model: TinyModel, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    example = ROOT / "examples" / name
    monkeypatch.chdir(ROOT)  # what an example names is named from here; what it writes is set below
    config = load(example, environment=Environment({})).config
    family = family or config.model.family
    flavour = flavour or config.model.flavour or ""
    values = {**smaller(config, tiny_model(family, flavour), tmp_path), **more}
    values |= {"cache.cache_dir": str(tmp_path / "cache"), "cache.text_cache_dir": str(tmp_path / "texts")}
    values |= {f"datasets[{dataset.id}].cache_dir": None for dataset in config.datasets}
    settings = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    code = gracetune("train", str(example), "--max-steps", "3", "--json", *settings)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    message = json.loads(captured.out)
    assert (message["outcome"], message["step"]) == ("finished", 3)
    assert len(message["files"]) == (2 if family == "wan" else 1)
    assert all(load_file(path) for path in message["files"])
    assert len(list((tmp_path / "out" / "samples").glob("000000002_*"))) >= len(config.validation.prompts)
