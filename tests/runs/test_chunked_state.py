"""Full fine-tunes whose optimizer keeps its state in chunks: a stopped and resumed run, with another home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError
from gracetune.train.output import MODEL_FILE
from gracetune.train.view import CollectingView
from runs.made_runs import TinyModel, config_for, run


def config_of(tiny_model: TinyModel, root: Path, home: str, steps: int) -> RunConfig:
    sections: dict[str, Any] = {
        "model": {"base_precision": "bf16"},
        "adapter": {"kind": "full_finetune"},
        "training": {"max_steps": steps, "mixed_precision": "bf16", "gradient_accumulation_steps": 2},
        "optimizer": {"lr": 1e-4, "state": {"home": home, "precision": "residual_bf16_moments"}},
    }
    return config_for("wan", tiny_model, root, **sections)


def weights(root: Path) -> dict[str, torch.Tensor]:
    files = sorted((root / "out" / "tiny").glob(f"*/{MODEL_FILE}"))
    return {f"{file.parent.name}/{name}": one for file in files for name, one in load_file(file).items()}


def test_a_resumed_run_with_another_home_ends_with_the_same_weights(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Both experts of Wan 2.2 train in turns. The self-check reads the saved files of each run."""
    whole, parted = (tmp_path / name for name in ("whole", "parted"))
    view = CollectingView()
    run(config_of(tiny_model, whole, "streamed", 6), view)
    run(config_of(tiny_model, parted, "streamed", 3))
    run(config_of(tiny_model, parted, "resident", 6))
    one, two = weights(whole), weights(parted)
    assert len(one) > 100
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any("streamed from host memory through 4 slots" in line for line in view.lines)


def test_a_checkpoint_of_another_kind_of_state_is_rejected_with_what_to_type(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    run(config_of(tiny_model, tmp_path, "streamed", 1))
    with pytest.raises(ConfigError, match=r"--set optimizer\.state\.home=streamed"):
        run(config_of(tiny_model, tmp_path, "auto", 2))
