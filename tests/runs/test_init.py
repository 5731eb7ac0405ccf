"""From a folder of images to an adapter that diffusers loads, with `init` and `train` and without editing a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import StableDiffusionXLPipeline

from runs.made_runs import TinyModel, images
from runs.test_commands import gracetune
from unit.captioning.tiny_captioners import write


def adapter_of(
    tiny_model: TinyModel, folder: Path, count: int, size: int, capsys: pytest.CaptureFixture[str], *flags: str
) -> Path:
    """Run both commands. The resulting adapter must change what diffusers generates."""
    model = tiny_model("sdxl", "base-1.0")
    for file in images(folder / "photos", count, size).glob("*.txt"):
        file.write_text("coloured squares")  # one prompt
    assert gracetune("init", "photos", "--yes", "--model", str(model), "--json", *flags) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert gracetune("train", config, "--json") == 0
    message = json.loads(capsys.readouterr().out)
    assert message["outcome"] == "finished"
    (file,) = map(Path, message["files"])
    pipeline = StableDiffusionXLPipeline.from_pretrained(model)
    pipeline.set_progress_bar_config(disable=True)

    def generated() -> torch.Tensor:
        options = {"num_inference_steps": 2, "width": 64, "height": 64, "output_type": "pt"}
        return pipeline("coloured squares", generator=torch.Generator().manual_seed(1), **options).images

    plain = generated()
    pipeline.load_lora_weights(file)
    assert not torch.equal(generated(), plain)
    return file


def test_a_folder_becomes_an_adapter(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = adapter_of(tiny_model, tmp_path, 12, 64, capsys, "--steps", "2", "--trigger", "sks")
    assert file == tmp_path / "output" / "photos" / "photos.safetensors"
    samples = {path.name[:9] for path in file.parent.glob("samples/*_seed42.png")}
    assert samples == {f"{step:09}" for step in range(3)}  # before the first step, and after each
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["output", "photos", "photos.yaml"]


def test_captions_of_a_model_are_trained(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`data caption`, `init`, `train`, one after another."""
    monkeypatch.chdir(tmp_path)
    for file in images(tmp_path / "photos", 3).glob("*.txt"):
        file.unlink()
    captioner = str(write("qwen3_vl", tmp_path / "qwen"))
    assert gracetune("data", "caption", "photos", "--model", captioner, "--trigger", "sks") == 0
    captions = {file.read_text().strip() for file in (tmp_path / "photos").glob("*.txt")}
    assert all(text.startswith("sks ") for text in captions)
    model = str(tiny_model("sdxl", "base-1.0"))
    assert gracetune("init", "photos", "--yes", "--model", model, "--steps", "1") == 0
    prompts = yaml.safe_load((tmp_path / "photos.yaml").read_text())["validation"]["prompts"]
    assert {one["prompt"] for one in prompts} == captions
    assert gracetune("train", "photos.yaml", "--set", "validation.every_steps=null") == 0
    capsys.readouterr()
    assert gracetune("data", "show", "photos.yaml", "--no-sheets", "--json") == 0
    (shown,) = json.loads(capsys.readouterr().out)["datasets"]
    assert shown["captions"]["origins"] == {"own": shown["samples"]}
