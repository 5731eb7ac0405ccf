from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from diffusers import AutoencoderKL, StableAudioDiTModel, UNet2DConditionModel, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import nn

from gracetune.cache.encoder import EncoderId
from gracetune.config.run_config import Model
from gracetune.errors import ConfigError
from gracetune.models.layout import part_tensors
from gracetune.models.loading import load_component, load_text_model
from gracetune.models.registry import spec_of
from gracetune.models.source import ModelSource, open_source
from gracetune.models.spec import EncodeOptions, PartPlacement
from gracetune.storage.safetensors_headers import WeightFileError
from unit.models import original_names as original

CPU = torch.device("cpu")
TinyModel = Callable[[str, str], Path]


def copied(folder: Path, into: Path) -> Path:
    shutil.copytree(folder, into)
    return into


def weights(folder: Path, part: str, stem: str = "diffusion_pytorch_model") -> dict[str, torch.Tensor]:
    return load_file(folder / part / f"{stem}.safetensors")


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    assert [n for n in mine if mine[n].dtype != other[n].dtype or not torch.equal(mine[n], other[n])] == []


def spoil(folder: Path, part: str, stem: str = "diffusion_pytorch_model") -> None:
    """Corrupt the folder's weights, so that correct ones can only come from the file."""
    file = folder / part / f"{stem}.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})


@pytest.fixture
def wan_file(tiny_model: TinyModel, tmp_path: Path) -> Path:
    folder = copied(tiny_model("wan", "t2v-1.3b-2.1"), tmp_path / "wan")
    file = folder / "wan2.1.safetensors"
    save_file(original.renamed(weights(folder, "transformer"), original.wan), file)
    return file


def wan_source(file: Path) -> ModelSource:
    return open_source(Model(family="wan", path=str(file)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wan_under_its_authors_names_with_its_float32_layers(wan_file: Path, dtype: torch.dtype) -> None:
    theirs = WanTransformer3DModel.from_pretrained(wan_file.parent / "transformer", torch_dtype=dtype)
    spoil(wan_file.parent, "transformer")
    source = wan_source(wan_file)
    ours = load_component(source, "transformer", WanTransformer3DModel, PartPlacement(CPU, dtype))
    assert_same(ours, theirs)
    assert {one.path for one in part_tensors(source, "transformer")} == {wan_file}
    vae = wan_file.parent / "vae" / "diffusion_pytorch_model.safetensors"
    assert {one.path for one in part_tensors(source, "vae")} == {vae}


def test_comfyuis_prefix(wan_file: Path) -> None:
    save_file({f"model.diffusion_model.{name}": t for name, t in load_file(wan_file).items()}, wan_file)
    theirs = WanTransformer3DModel.from_pretrained(wan_file.parent / "transformer")
    ours = load_component(wan_source(wan_file), "transformer", WanTransformer3DModel, PartPlacement(CPU, torch.float32))
    assert_same(ours, theirs)


def test_diffusers_own_names_in_one_file(wan_file: Path) -> None:
    shutil.copyfile(wan_file.parent / "transformer" / "diffusion_pytorch_model.safetensors", wan_file)
    theirs = WanTransformer3DModel.from_pretrained(wan_file.parent / "transformer")
    spoil(wan_file.parent, "transformer")
    ours = load_component(wan_source(wan_file), "transformer", WanTransformer3DModel, PartPlacement(CPU, torch.float32))
    assert_same(ours, theirs)


def whole_sdxl(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a folder under the names of the published checkpoint."""
    vae = {name: original.vae_tensor(name, tensor) for name, tensor in weights(folder, "vae").items()}
    tensors = {
        **original.renamed(weights(folder, "unet"), original.sdxl_unet),
        **original.renamed(vae, original.sdxl_vae),
        **original.clip_l(weights(folder, "text_encoder", "model")),
        **original.open_clip(weights(folder, "text_encoder_2", "model")),
    }
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def test_a_whole_sdxl_checkpoint(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copied(tiny_model("sdxl", "base-1.0"), tmp_path / "sdxl")
    file = folder / "sd_xl.safetensors"
    save_file(whole_sdxl(folder), file)
    classes: dict[str, Any] = {"unet": UNet2DConditionModel, "vae": AutoencoderKL}
    texts: dict[str, Any] = {
        "text_encoder": transformers.CLIPTextModel,
        "text_encoder_2": transformers.CLIPTextModelWithProjection,
    }
    theirs = {part: cls.from_pretrained(folder / part) for part, cls in (classes | texts).items()}
    theirs = {part: model.to(torch.float32) for part, model in theirs.items()}
    originals = {part: {n: t.clone() for n, t in model.state_dict().items()} for part, model in theirs.items()}
    for part in classes:
        spoil(folder, part)
    for part in texts:
        spoil(folder, part, "model")
    source = open_source(Model(family="sdxl", path=str(file)))
    placement = PartPlacement(CPU, torch.float32)
    ours = {part: load_component(source, part, cls, placement) for part, cls in classes.items()}
    ours |= {part: load_text_model(source, part, cls, placement) for part, cls in texts.items()}
    for part, model in ours.items():
        state = model.state_dict()
        assert [name for name, tensor in originals[part].items() if not torch.equal(state[name], tensor)] == [], part
        assert not any(parameter.requires_grad for parameter in model.parameters())


def test_each_part_of_a_whole_checkpoint_is_known_by_its_own_tensors(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Two files with the same VAE share latents; with other text encoders they share no embeddings."""
    spec = spec_of("sdxl")
    folder = copied(tiny_model("sdxl", "base-1.0"), tmp_path / "sdxl")
    tensors = whole_sdxl(folder)
    placement = PartPlacement(torch.device("meta"), torch.float32)

    def ids(**changed: torch.Tensor) -> tuple[EncoderId, EncoderId]:
        file = folder / "sd_xl.safetensors"
        save_file({**tensors, **changed}, file)
        source = open_source(Model(family="sdxl", path=str(file)))
        latents = spec.load_latent_encoder(source, placement, EncodeOptions())
        return latents.id, spec.load_text_encoder(source, placement).id

    def other(prefix: str) -> dict[str, torch.Tensor]:
        name = next(name for name in sorted(tensors) if name.startswith(prefix))
        return {name: tensors[name] + 1}

    latents, texts = ids()
    assert ids(**other("model.diffusion_model.")) == (latents, texts)
    for text in ("conditioner.embedders.0.", "conditioner.embedders.1."):
        found = ids(**other(text))
        assert found[0] == latents
        assert found[1] != texts
    found = ids(**other("first_stage_model."))
    assert found[0] != latents
    assert found[1] == texts


# -- rejections -------------------------------------------------------------------------------------------------------


def test_a_missing_tensor_and_one_too_many(wan_file: Path) -> None:
    tensors = load_file(wan_file)
    tensors["blocks.0.ffn.9.weight"] = tensors.pop("blocks.0.ffn.2.weight")
    save_file(tensors, wan_file)
    with pytest.raises(WeightFileError) as rejected:
        load_component(wan_source(wan_file), "transformer", WanTransformer3DModel, PartPlacement(CPU, torch.float32))
    by_key = {problem.key: problem.found for problem in rejected.value.problems}
    assert by_key["blocks.0.ffn.net.2.weight"] == "no tensor of this name"
    assert by_key["blocks.0.ffn.9.weight"] == "an unexpected tensor"


def test_another_shape_and_a_value_too_large(wan_file: Path) -> None:
    tensors = load_file(wan_file)
    tensors["head.head.bias"].fill_(1e6)
    save_file(tensors, wan_file)
    with pytest.raises(WeightFileError, match=r"the value 1e\+06"):
        load_component(wan_source(wan_file), "transformer", WanTransformer3DModel, PartPlacement(CPU, torch.float16))
    tensors["head.head.bias"] = torch.zeros(3)
    save_file(tensors, wan_file)
    with pytest.raises(WeightFileError, match=r"shape \(3,\)"):
        load_component(wan_source(wan_file), "transformer", WanTransformer3DModel, PartPlacement(CPU, torch.float32))


def test_weights_of_another_family(wan_file: Path, tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copied(tiny_model("sdxl", "base-1.0"), tmp_path / "sdxl")
    shutil.copyfile(wan_file, folder / "model.safetensors")
    source = open_source(Model(family="sdxl", path=str(folder / "model.safetensors")))
    with pytest.raises(WeightFileError, match=r"check that this file belongs to model\.family"):
        load_component(source, "unet", UNet2DConditionModel, PartPlacement(CPU, torch.float32))


def test_a_class_diffusers_reads_no_single_file_for(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copied(tiny_model("stable_audio", "open-1.0"), tmp_path / "audio")
    save_file({"model.model.a": torch.ones(2)}, folder / "model.safetensors")
    source = open_source(Model(family="stable_audio", path=str(folder / "model.safetensors")))
    with pytest.raises(ConfigError, match="a layout diffusers reads for StableAudioDiTModel"):
        load_component(source, "transformer", StableAudioDiTModel, PartPlacement(CPU, torch.float32))


def test_text_encoders_in_an_unsupported_layout(wan_file: Path) -> None:
    save_file({**load_file(wan_file), "text_encoders.t5xxl.a": torch.ones(1)}, wan_file)
    with pytest.raises(ConfigError, match="also holds text encoders"):
        wan_source(wan_file)
