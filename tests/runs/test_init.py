"""From a folder of images to an adapter that diffusers loads, with `init` and `train` and without editing a file.

The commands are those of the README and of docs/quickstart.md, as they are written there.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import StableDiffusionXLPipeline

from runs.launched import command_line
from runs.made_runs import TinyModel, images
from runs.test_commands import gracetune
from unit.captioning.tiny_captioners import write
from unit.docs.targets import ROOT
from unit.docs.test_command_blocks import blocks


@pytest.fixture
def model(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's working folder: `photos`, whose captions give one prompt, and `sdxl`."""
    monkeypatch.chdir(tmp_path)
    for file in images(tmp_path / "photos", 25).glob("*.txt"):
        file.write_text("coloured squares")
    Path("sdxl").symlink_to(tiny_model("sdxl", "base-1.0"))
    return tmp_path / "sdxl"


def commands(page: str, block: int) -> list[list[str]]:
    """The arguments of gracetune in a block of a page that names this test."""
    marked = [one for one in blocks(ROOT / page) if one.mark == "run: tests/runs/test_init.py"]
    return [shlex.split(line)[1:] for line in marked[block].commands]


def on_a_terminal(arguments: list[str], answers: bytes) -> str:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, *command_line(*arguments)], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, answers)
    printed = b""
    with contextlib.suppress(OSError):  # the terminal ends with the process
        while received := os.read(ours, 4096):
            printed += received
    os.close(ours)
    assert process.wait() == 0, printed.decode()
    return printed.decode()


def changes_samples(file: Path, model: Path) -> None:
    """The adapter must change what diffusers generates."""
    pipeline = StableDiffusionXLPipeline.from_pretrained(model)
    pipeline.set_progress_bar_config(disable=True)

    def generated() -> torch.Tensor:
        options = {"num_inference_steps": 2, "width": 64, "height": 64, "output_type": "pt"}
        return pipeline("coloured squares", generator=torch.Generator().manual_seed(1), **options).images

    plain = generated()
    pipeline.load_lora_weights(file)
    assert not torch.equal(generated(), plain)


def test_a_folder_becomes_an_adapter(model: Path) -> None:
    """The two commands with four answers: Enter, the model, Enter, two steps."""
    init, train = commands("README.md", 0)
    assert commands("docs/quickstart.md", 0) == [init, train]
    assert "gracetune train photos.yaml" in on_a_terminal(init, b"\n./sdxl\n\n2\n")
    assert gracetune(*train) == 0
    output = model.parent / "output" / "photos"
    changes_samples(output / "photos.safetensors", model)
    assert "coloured squares" in (output / "report.html").read_text()
    samples = {path.name[:9] for path in output.glob("samples/*_seed42.png")}
    assert samples == {f"{step:09}" for step in range(3)}  # before the first step, and after each
    assert [path.name for path in sorted(model.parent.iterdir())] == ["output", "photos", "photos.yaml", "sdxl"]


@pytest.mark.full
def test_the_readme_shows_what_is_printed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line that the README shows is printed, in this order, except for its numbers."""
    (block,) = (one for one in blocks(ROOT / "README.md") if "$ gracetune init" in one.text)
    shown, printed = [], []
    for line in block.text.splitlines():
        if line.startswith("$ gracetune "):
            assert gracetune(*shlex.split(line)[2:]) == 0
            output = capsys.readouterr()
            printed += (output.err + output.out).replace(str(model.parent), "/home/me").splitlines()
        elif line.strip() not in ("", "..."):
            shown.append(_without_numbers(line))
    rest = iter([_without_numbers(line) for line in printed])
    assert [line for line in shown if line not in rest] == []


def _without_numbers(line: str) -> str:
    """The words of a line. Numbers and units of durations and sizes depend on the machine."""
    line = re.sub(r"\d[\d,.]*(e[-+]\d+)?(?!\d)", "0", line.strip())
    return re.sub(r"0h 0m|0m 0s|0 (ms|s)\b", "0 s", re.sub(r"[KMG]iB", "B", line))


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
