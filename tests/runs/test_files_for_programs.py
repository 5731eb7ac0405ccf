"""A run whose files a program would misread is rejected before it encodes anything; for another program it trains."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from PIL import Image

from gracetune.adapters.adapter_files import open_adapter

pytestmark = pytest.mark.full


def test_a_dora_for_comfyui_and_for_lycoris(tiny_model: Callable[[str, str], Path], tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    Image.new("RGB", (64, 64), (90, 50, 20)).save(images / "a.png")
    (images / "a.txt").write_text("a square")
    config, output = tmp_path / "config.yaml", tmp_path / "out"
    config.write_text(
        yaml.safe_dump(
            {
                "gracetune": 1, "name": "x", "output_dir": str(output), "training": {"max_steps": 4},
                "model": {"family": "sdxl", "path": str(tiny_model("sdxl", "base-1.0"))},
                "datasets": [{"id": "a", "path": str(images), "resolution": 64}],
                "adapter": {"kind": "dora", "rank": 2}, "checkpoints": {"format": "lycoris"},
            }
        )
    )  # fmt: skip
    command = [sys.executable, "-m", "gracetune", "train", str(config)]
    rejected = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert rejected.returncode == 1
    stated = " ".join(rejected.stderr.split())
    assert "norm of the base weight" in stated
    assert "--set checkpoints.for_program=lycoris" in stated
    assert "latent" not in stated, "nothing is encoded"
    assert not (output / "x.safetensors").exists()
    command += ["--set", "checkpoints.for_program=lycoris"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "the files are for LyCORIS: ComfyUI divides" in " ".join(done.stderr.split())
    programs = open_adapter(output / "x.safetensors", "sdxl").programs()
    assert [name for name, reason in programs.items() if reason is None] == ["lycoris"]
