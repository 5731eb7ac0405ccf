"""The script that trained the base of `gracetune demo` runs as one command, from nothing to a model folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline

from gracetune.train.demo import BASE

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "train_demo_base.py"

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


def test_the_result_is_a_model_like_the_base_in_the_package(tmp_path: Path) -> None:
    """With a five-hundredth of the steps and images."""
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "base", "--share", "0.002"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    trained, ours = (
        StableDiffusionXLPipeline.from_pretrained(str(folder), local_files_only=True, dtype=torch.float32)
        for folder in (tmp_path / "base", BASE)
    )
    for part in ("unet", "vae", "text_encoder", "text_encoder_2"):
        shapes = [
            {name: value.shape for name, value in getattr(one, part).state_dict().items()} for one in (trained, ours)
        ]
        assert shapes[0] == shapes[1]
    assert trained.tokenizer.get_vocab() == ours.tokenizer.get_vocab()
    assert trained.scheduler.config == ours.scheduler.config
    image = trained("a red circle on a blue background", width=64, height=64, num_inference_steps=1, output_type="pt")
    assert torch.isfinite(image.images).all()
    assert len([*(tmp_path / "base.work").glob("step_*.png")]) == 4
    assert {file.name for file in tmp_path.iterdir()} == {"base", "base.work"}
