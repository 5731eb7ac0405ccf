"""Incomplete or mislabelled folders are rejected by name, for every family."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel

from gracetune.config.run_config import Model
from gracetune.errors import ConfigError, GracetuneError
from gracetune.models.layout import part_config, read_config
from gracetune.models.registry import spec_of
from gracetune.models.source import ModelSource, open_source
from gracetune.models.spec import EncodeOptions, PartPlacement

CPU = PartPlacement(torch.device("cpu"), torch.float32)
TinyModel = Callable[[str, str], Path]
FAMILIES = {
    "wan": "t2v-14b-2.2",
    "qwen_image": "edit-2509",
    "flux": "schnell",
    "flux2": "klein-base-4b",
    "z_image": "turbo",
    "krea2": "raw",
    "sdxl": "base-1.0",
    "stable_audio": "open-1.0",
}
Break = Callable[[Path], object]


def without(*names: str) -> Break:
    return lambda folder: [(folder / name).unlink(missing_ok=True) for name in names]


def written(name: str, text: str) -> Break:
    return lambda folder: (folder / name).write_text(text)


def setting(name: str, **values: Any) -> Break:
    def change(folder: Path) -> None:
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, **values}))

    return change


def cut_off(name: str) -> Break:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def everything(family: str, folder: Path) -> None:
    """Load everything a run loads."""
    spec = spec_of(family)
    source = open_source(Model(family=family, path=str(folder)))  # type: ignore[arg-type]
    facts = spec.inspect(source)
    spec.load_text_encoder(source, CPU)
    spec.load_latent_encoder(source, CPU, EncodeOptions())
    for expert in facts.experts:
        spec.load_denoiser(source, expert, CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_complete_folder_with_a_unicode_name(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tmp_path / "モデル é 🐈 'q\""
    shutil.copytree(tiny_model(family, FAMILIES[family]), folder)
    everything(family, folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("breaks", "expected_text"),
    [
        (without("tokenizer/tokenizer.json"), "tokenizer without its vocabulary"),
        (written("tokenizer/tokenizer.json", "{"), r"tokenizer\.json: [\s\S]*invalid JSON"),
        (written("tokenizer/tokenizer.json", "{}"), r"tokenizer\.json: [\s\S]*no vocabulary"),
        (written("tokenizer/tokenizer_config.json", "[]"), r"tokenizer_config\.json: [\s\S]*a list"),
        (written("text_encoder/config.json", "{"), r"text_encoder/config\.json: [\s\S]*invalid JSON"),
        (cut_off("text_encoder/model.safetensors"), "it is truncated"),
        (without("text_encoder/model.safetensors"), r"text_encoder: weights[\s\S]*expected  diffusion_pytorch_model"),
        (without("vae/config.json"), r"vae without config\.json"),
        (
            setting("vae/config.json", new_switch=True, _diffusers_version="99.0.0.dev0"),
            r"settings\n.*new_switch, written by diffusers 99.*\n.*only settings .* of diffusers 0\.[\s\S]*--upgrade",
        ),
        (written("model_index.json", "{"), r"model_index\.json: [\s\S]*invalid JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_problems_are_named(
    family: str, breaks: Break, expected_text: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model(family, FAMILIES[family]), tmp_path / "model"))
    breaks(folder)
    with pytest.raises(GracetuneError, match=expected_text):
        everything(family, folder)


def test_a_processor_without_its_images_half(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("qwen_image", "edit"), tmp_path / "model"))
    without("processor/preprocessor_config.json", "processor/processor_config.json")(folder)
    with pytest.raises(ConfigError, match="processor cannot be read"):
        everything("qwen_image", folder)


def test_text_weights_of_another_width(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("sdxl", "base-1.0"), tmp_path / "model"))
    setting("text_encoder/config.json", hidden_size=8)(folder)
    with pytest.raises(GracetuneError, match=r"position_embedding\.weight\n.*shape \(77, 32\)\n.*shape \(77, 8\)"):
        everything("sdxl", folder)


def test_inconsistent_values_are_rejected(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("sdxl", "base-1.0"), tmp_path / "model"))
    setting("unet/config.json", block_out_channels=[32])(folder)
    with pytest.raises(ConfigError, match=r"the configuration\n.*block_out_channels"):
        everything("sdxl", folder)


def test_a_configuration_has_the_values_its_file_leaves_out(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("flux", "dev"), tmp_path / "model"))
    file = folder / "transformer" / "config.json"
    config = json.loads(file.read_text())
    del config["guidance_embeds"]
    file.write_text(json.dumps({**config, "dropped_since": 1}))
    source = ModelSource("flux", folder)
    assert "guidance_embeds" not in read_config(source, "transformer")
    assert part_config(source, "transformer", FluxTransformer2DModel)["guidance_embeds"] is False
    assert spec_of("flux").inspect(source).flavour == "schnell"


def test_pickled_weights_are_rejected(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("sdxl", "base-1.0"), tmp_path / "model"))
    (folder / "unet" / "diffusion_pytorch_model.safetensors").rename(folder / "unet" / "diffusion_pytorch_model.bin")
    with pytest.raises(GracetuneError, match=r"only pickled weights \(diffusion_pytorch_model\.bin\)"):
        everything("sdxl", folder)
