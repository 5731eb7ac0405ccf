from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from gracetune.config.run_config import Model
from gracetune.errors import ConfigError
from gracetune.models.hub_download import needed_files, variant_of
from gracetune.models.source import INDEX, open_source

TinyModel = Callable[[str, str], Path]


def model(path: Path | str | None, family: str = "sdxl", **options: Any) -> Model:
    return Model(family=family, path=None if path is None else str(path), **options)  # type: ignore[arg-type]


def rejection(requested: Model, **options: Any) -> str:
    with pytest.raises(ConfigError) as rejected:
        open_source(requested, **options)
    return str(rejected.value)


@pytest.fixture
def sdxl(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A copy of a tiny SDXL to change."""
    folder = tmp_path / "sdxl"
    shutil.copytree(tiny_model("sdxl", "base-1.0"), folder)
    return folder


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, as huggingface_hub lays it out."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put_into_cache(cache: Path, hub_id: str, folder: Path, revision: str = "main") -> Path:
    home = cache / f"models--{hub_id.replace('/', '--')}"
    commit = "0" * 39 + str(len(revision) % 10)
    shutil.copytree(folder, home / "snapshots" / commit)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / revision).write_text(commit)
    return home / "snapshots" / commit


# -- what is found ----------------------------------------------------------------------------------------------------


def test_a_folder_absolute_relative_and_at_home(sdxl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_source(model(sdxl)).folder == sdxl
    monkeypatch.chdir(sdxl.parent)
    assert open_source(model("sdxl")).folder.resolve() == sdxl
    monkeypatch.setenv("HOME", str(sdxl.parent))
    found = open_source(model("~/sdxl"))
    assert found.folder == sdxl
    assert found.name == "~/sdxl"
    assert found.part("unet") == sdxl / "unet"


def test_parts_from_elsewhere(sdxl: Path, tiny_model: TinyModel) -> None:
    other = tiny_model("sdxl", "base-1.0")
    found = open_source(model(sdxl, vae_path=str(other / "vae"), text_encoder_path=str(other)))
    assert found.part("vae") == other / "vae"
    assert found.part("text_encoder") == other / "text_encoder"
    assert found.part("text_encoder_2") == sdxl / "text_encoder_2"


def test_a_hub_id_and_an_unset_path_are_found_in_the_hubs_cache(sdxl: Path, hub_cache: Path) -> None:
    snapshot = put_into_cache(hub_cache, "stabilityai/stable-diffusion-xl-base-1.0", sdxl)
    assert open_source(model("stabilityai/stable-diffusion-xl-base-1.0")).folder == snapshot
    found = open_source(model(None))
    assert found.folder == snapshot
    assert found.name == "stabilityai/stable-diffusion-xl-base-1.0"
    tagged = put_into_cache(hub_cache, "someone/theirs", sdxl, "v2.0")
    assert open_source(model("someone/theirs", revision="v2.0")).folder == tagged


def test_revision_of_a_local_folder_is_rejected(sdxl: Path) -> None:
    stated = rejection(model(sdxl, revision="v2.0"))
    assert f"v2.0, with {sdxl}" in stated
    assert "remove model.revision" in stated


def test_a_single_file_takes_its_configuration_from_around_it_or_the_published_model(
    sdxl: Path, tmp_path: Path, hub_cache: Path
) -> None:
    file = tmp_path / "elsewhere" / "tuned.safetensors"
    file.parent.mkdir()
    shutil.copyfile(sdxl / "unet" / "diffusion_pytorch_model.safetensors", file)
    beside = sdxl / "tuned.safetensors"
    shutil.copyfile(file, beside)
    assert open_source(model(beside)).folder == sdxl
    assert open_source(model(beside)).single_file == beside
    assert open_source(model(file, vae_path=str(sdxl / "vae"))).folder == sdxl
    stated = rejection(model(file))
    assert "weights without a configuration" in stated
    assert "stabilityai/stable-diffusion-xl-base-1.0" in stated
    snapshot = put_into_cache(hub_cache, "stabilityai/stable-diffusion-xl-base-1.0", sdxl)
    assert open_source(model(file)).folder == snapshot


# -- rejections -------------------------------------------------------------------------------------------------------


def test_unknown_hub_id_names_every_folder_tried(hub_cache: Path) -> None:
    stated = rejection(model("someone/their-model", revision="abc"))
    assert "someone/their-model at revision abc" in stated
    assert str(Path("someone/their-model").absolute()) in stated
    assert str(hub_cache / "models--someone--their-model") in stated
    assert "hf download someone/their-model" in stated


def test_interrupted_download(sdxl: Path, hub_cache: Path) -> None:
    snapshot = put_into_cache(hub_cache, "someone/half", sdxl)
    index = json.loads((snapshot / "model_index.json").read_text())
    (snapshot / "model_index.json").write_text(json.dumps({**index, "an_option": [2, 5, 8], "another": [1, 2]}))
    open_source(model("someone/half"))
    shutil.rmtree(snapshot / "vae")
    assert "lacks vae" in rejection(model("someone/half"))


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/nothing-here", "a/b/c", "model.safetensors"])
def test_missing_paths(name: str) -> None:
    assert "which does not exist" in rejection(model(name))


def test_folders_of_the_wrong_kind(sdxl: Path, tmp_path: Path, hub_cache: Path) -> None:
    assert "one part of a model (unet), not a whole one\n" in rejection(model(sdxl / "unet"))
    assert f"--set model.path={sdxl}" in rejection(model(sdxl / "unet"))
    put_into_cache(hub_cache, "someone/theirs", sdxl)
    assert "--set model.path=someone/theirs" in rejection(model(hub_cache / "models--someone--theirs"))
    for name, content, expected in [
        ("adapter", "adapter_config.json", "an adapter saved by peft"),
        ("pickled", "pytorch_model.bin", "pickled weights, pytorch_model.bin"),
        ("single", "wan.safetensors", "--set model.path="),
        ("pictures", "cat.png", "it holds cat.png"),
    ]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / content).write_bytes(b"")
        assert expected in rejection(model(folder))
    (tmp_path / "empty").mkdir()
    assert "it is empty" in rejection(model(tmp_path / "empty"))
    (sdxl / INDEX).unlink()
    assert "parts (text_encoder, text_encoder_2, unet, vae) without model_index.json" in rejection(model(sdxl))


@pytest.mark.parametrize("ending", ["bin", "ckpt", "pt", "pth"])
def test_pickled_files(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"model.{ending}"
    torch.save({}, file)
    assert "pickled weights" in rejection(model(file))


def test_files_of_the_wrong_kind(sdxl: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "a .gguf file" in rejection(model(tmp_path / "model.gguf"))
    for key in ("lora_unet_a.lora_up.weight", "transformer.a.lora_A.weight", "diffusion_model.a.lokr_w1"):
        save_file({key: torch.ones(1), key.rsplit(".", 1)[0] + ".alpha": torch.ones(1)}, tmp_path / "lora.safetensors")
        assert "an adapter" in rejection(model(tmp_path / "lora.safetensors"))
    assert "a file" in rejection(model(sdxl, vae_path=str(sdxl / INDEX)))
    assert "it holds" in rejection(model(sdxl, vae_path=str(tmp_path)))


def test_one_file_for_a_model_with_two_experts(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tmp_path / "wan"
    shutil.copytree(tiny_model("wan", "t2v-14b-2.2"), folder)
    shutil.copyfile(folder / "transformer" / "diffusion_pytorch_model.safetensors", folder / "tuned.safetensors")
    assert "has two denoisers" in rejection(model(folder / "tuned.safetensors", family="wan"))


def test_unknown_variant(sdxl: Path) -> None:
    assert "this model has no variants" in rejection(model(sdxl, variant="fp16"))
    weights = sdxl / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".fp16.safetensors"))
    assert open_source(model(sdxl, variant="fp16")).variant == "fp16"
    assert "one of fp16, or none" in rejection(model(sdxl, variant="bf16"))


# -- which files of a repository are needed ---------------------------------------------------------------------------

REPOSITORY = [
    ".gitattributes", "README.md", INDEX, "sd_xl_base_1.0.safetensors", "images/pipeline.png",
    "scheduler/scheduler_config.json", "tokenizer/vocab.json", "tokenizer/merges.txt",
    "text_encoder/config.json", "text_encoder/model.safetensors", "text_encoder/model.fp16.safetensors",
    "text_encoder/pytorch_model.bin", "text_encoder/openvino_model.bin",
    "unet/config.json", "unet/diffusion_pytorch_model-00001-of-00002.safetensors",
    "unet/diffusion_pytorch_model-00002-of-00002.safetensors", "unet/diffusion_pytorch_model.safetensors.index.json",
    "unet/diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
    "unet/diffusion_pytorch_model-00002-of-00002.fp16.safetensors",
    "vae/config.json", "vae/diffusion_pytorch_model.safetensors", "vae/flax_model.msgpack",
]  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (None, {"text_encoder/model.safetensors", "unet/diffusion_pytorch_model-00001-of-00002.safetensors",
                "unet/diffusion_pytorch_model-00002-of-00002.safetensors", "vae/diffusion_pytorch_model.safetensors"}),
        ("fp16", {"text_encoder/model.fp16.safetensors", "vae/diffusion_pytorch_model.safetensors",
                  "unet/diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
                  "unet/diffusion_pytorch_model-00002-of-00002.fp16.safetensors"}),
    ],
)  # fmt: skip
def test_only_the_files_a_model_is_loaded_from(variant: str | None, expected: set[str]) -> None:
    wanted = needed_files(REPOSITORY, variant)
    assert {name for name in wanted if name.endswith(".safetensors")} == expected
    small = {name for name in wanted if not name.endswith(".safetensors")}
    assert {INDEX, "tokenizer/merges.txt", "unet/config.json", "scheduler/scheduler_config.json"} <= small
    assert not any(name.endswith((".bin", ".png", ".msgpack", ".md")) for name in wanted)


def test_a_part_published_alone_has_its_weights_in_the_root() -> None:
    wanted = needed_files(["config.json", "diffusion_pytorch_model.safetensors", "sdxl.vae.safetensors"], None)
    assert wanted == ["config.json", "diffusion_pytorch_model.safetensors"]


@given(st.sampled_from(["fp16", "bf16", "non_ema"]), st.booleans(), st.booleans())
def test_variant_of_a_file_name(variant: str, sharded: bool, older: bool) -> None:
    shard = "-00001-of-00003" if sharded else ""
    named = f"unet/model{shard}.{variant}.safetensors" if older else f"unet/model.{variant}{shard}.safetensors"
    assert variant_of(named) == variant
    assert variant_of(f"unet/model{shard}.safetensors") is None
