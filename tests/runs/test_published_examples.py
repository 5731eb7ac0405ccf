"""The peers' published examples through `gracetune train FILE --max-steps 2`, on stand-ins for weights and data.

A hub on this machine has tiny weights and small datasets under the names that the files give; folders that a file
leaves for its user to fill in are made here. All else stays as published, but for `overrides`, which says why.
"""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from PIL import Image
from safetensors.torch import load_file, save

from gracetune.config import Environment, load
from gracetune.config.families import find_flavour
from gracetune.config.family_names import Flavour
from gracetune.config.run_config import RunConfig
from runs.made_runs import TinyModel, shrink_references
from runs.test_commands import gracetune
from runs.test_remote_data import files_of
from servers.hub import HubServer
from unit.data.copies.sample_sources import encoded_image, parquet
from unit.fidelity.published import REJECTED, Example, examples

EXAMPLES = examples()
EVERY_DAY = (
    "sdxl.lycoris-lokr",
    "wan2.1-i2v-14b-480p-8xh100.peft-lora+cp-fa3",
    "train_lora_flux_kontext_24gb",
    "train_lora_wan21_1b_24gb",
)
"""Both dialects; images, clips from a first frame, edits. The others take minutes together."""
AS_MAX_STEPS = ("--set", "training.max_steps=2", "--set", "training.epochs=null")
"""What `--max-steps 2` of `train` is for `config check`."""
SMALLER = 8
"""By what sides are divided: the published ones take minutes on a CPU."""
SIDE = 32
"""The sides of generated images are multiples of this."""
THEIR_FOLDERS = ("/path/to", "/root/ai-toolkit")
"""The placeholders of a user's folders in ai-toolkit's files."""


@pytest.fixture
def small_references(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_references(monkeypatch)


def each() -> Iterator[Any]:
    for name in EXAMPLES:
        if name not in REJECTED:
            yield pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.full)


@pytest.mark.usefixtures("small_references")
@pytest.mark.parametrize("name", [*each()])
def test_a_published_example_trains(
    name: str, hub: HubServer, tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    example = EXAMPLES[name]
    path = with_own_folders(example, tmp_path)
    monkeypatch.chdir(tmp_path)
    config = load(path, environment=Environment({}), allow_unsupported=True).config
    fill_hub(hub, example, config, tiny_model, tmp_path)
    fill_folders(config)
    values = overrides(config)
    settings = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]

    assert gracetune("config", "check", "--no-paths", "--json", *settings, *AS_MAX_STEPS, str(path)) == 0
    (checked,) = json.loads(capsys.readouterr().out)["files"]
    code = gracetune("train", str(path), "--max-steps", "2", "--json", *settings)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    message = json.loads(captured.out)
    assert (message["outcome"], message["step"]) == ("finished", 2)

    folder = Path(message["folder"])
    assert folder.is_relative_to(tmp_path)
    (log,) = folder.glob("logs/*.jsonl")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [event["loss"] for event in events if event["kind"] == "StepDone"]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    warned = [event["message"] for event in events if event["kind"] == "Warned"]
    assert checked["notes"] == warned[: len(checked["notes"])]
    files = [Path(file) for file in message["files"]]
    assert len(files) == (2 if flavour_of(config).dual_expert and config.model.experts == "both" else 1)
    assert any(has_learned(load_file(file)) for file in files)  # experts take turns, ten steps each
    last = [*folder.glob("samples/000000002_*_seed*")]
    assert len(last) == len(config.validation.prompts) * config.validation.images_per_prompt
    copies = [json.loads(file.read_text()) for file in tmp_path.rglob("copy.json")]
    assert all(one["complete"] for one in copies)
    assert {one["source"] for one in copies} == {one.path for one in config.datasets if "://" in one.path}


def flavour_of(config: RunConfig) -> Flavour:
    found = find_flavour(config.model.family, config.model.flavour or "")
    assert found is not None
    return found


def has_learned(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether tensors that are zero before the first step have changed."""
    return any(bool(one.any()) for name, one in tensors.items() if name.endswith((".lora_B.weight", ".lokr_w2")))


def overrides(config: RunConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "logging.every_steps": 1,  # each of the two
        "validation.every_steps": 2,
        "validation.steps": 2,
    }
    for name in ("width", "height"):
        published = getattr(config.validation, name)
        values[f"validation.{name}"] = max(2, round(published / SMALLER / SIDE)) * SIDE
    for one in config.datasets:
        sizes = one.model_dump(include={"resolution", "minimum_size", "minimum_edge", "maximum_size", "downsample_to"})
        values |= {f"datasets[{one.id}].{name}": size / SMALLER for name, size in sizes.items() if size}
    if config.optimizer.name == "adamw_8bit":
        values["optimizer.name"] = "adamw"  # bitsandbytes works on GPUs alone
    if config.training.attention == "flash_attn_3":
        values["training.attention"] = "auto"  # a kernel for GPUs
    return values


# -- stand-ins --------------------------------------------------------------------------------------------------------


def with_own_folders(example: Example, folder: Path) -> Path:
    """The published files, with folders of this machine in place of a user's."""
    path = example.write(folder / "published")
    text = path.read_text()
    for theirs in THEIR_FOLDERS:
        text = text.replace(theirs, str(folder / "own"))
    path.write_text(text)
    return path


def fill_hub(hub: HubServer, example: Example, config: RunConfig, tiny_model: TinyModel, scratch: Path) -> None:
    """The repositories that a config names."""
    model, flavour = config.model, flavour_of(config)
    folder = tiny_model(model.family, flavour.name)
    if "TREAD" in example.name and flavour.name in BLOCKS:
        folder = with_blocks(folder, scratch / "deep", BLOCKS[flavour.name])
    hub.model(model.path or flavour.weights, files_of(folder))
    if model.vae_path is not None:
        hub.model(model.vae_path, files_of(folder / "vae"))
    for row in example.rows:
        if row.key.endswith("assistant_lora_path"):
            hub.model(row.value, {"pytorch_lora_weights.safetensors": small_lora(folder / "transformer")})
    for dataset in config.datasets:
        if dataset.path.startswith("hf://datasets/"):
            content = clips() if dataset.dataset_type == "video" else images()
            hub.dataset(dataset.path.removeprefix("hf://datasets/"), content)


BLOCKS = {"t2v-1.3b-2.1": 30, "i2v-14b-2.2": 40}
"""The published models', where a `tread_config` counts them; tiny ones have two."""


def with_blocks(tiny: Path, folder: Path, count: int) -> Path:
    shutil.copytree(tiny, folder)
    torch.manual_seed(0)
    for denoiser in folder.glob("transformer*"):
        options = WanTransformer3DModel.load_config(denoiser)
        WanTransformer3DModel.from_config({**options, "num_layers": count}).save_pretrained(denoiser)
    return folder


def small_lora(denoiser: Path) -> bytes:
    """A LoRA as diffusers saves it."""
    tensors = {}
    for name, weight in load_file(denoiser / "diffusion_pytorch_model.safetensors").items():
        if name.endswith("attn.to_k.weight"):
            stem = f"transformer.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.full((2, weight.shape[1]), 0.01)
            tensors[f"{stem}.lora_B.weight"] = torch.full((weight.shape[0], 2), 0.01)
    return save(tensors)


def fill_folders(config: RunConfig) -> None:
    for dataset in config.datasets:
        if "://" not in dataset.path:
            fill_folder(Path(dataset.path), captions=dataset.dataset_type != "conditioning")
    for prompt in config.validation.prompts:
        for file in map(Path, prompt.references):
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (160, 128), "teal").save(file)


def fill_folder(folder: Path, *, captions: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate(SIZES):
        (folder / f"{number}.png").write_bytes(encoded_image(number, size))
        if captions:
            (folder / f"{number}.txt").write_text(f"p3r5on, number {number}")


SIZES = ((160, 160), (200, 144), (144, 200))


@cache
def images() -> dict[str, bytes]:
    rows = [
        {"image": {"bytes": encoded_image(number, size), "path": None}, "text": "x"}
        for number, size in enumerate(SIZES)
    ]
    return {"data/train-00000-of-00001.parquet": parquet(rows)}


@cache
def clips() -> dict[str, bytes]:
    made = {f"videos/{number}.mp4": clip(number, 90, (160, 96)) for number in range(2)}
    table = "file_name,prompt\n" + "".join(f"{path},a clip of {path}\n" for path in made)
    return {**made, "metadata.csv": table.encode()}


def clip(seed: int, frames: int, size: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=16)
        stream.width, stream.height = size
        for number in range(frames):
            pixels = np.full((size[1], size[0], 3), (seed * 60 + number) % 256, dtype=np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()
