from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers import AutoencoderKL, UNet2DConditionModel, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gracetune.errors import ConfigError
from gracetune.models.hub_download import index_parts
from gracetune.models.layout import part_tensors, read_config, read_index, weight_file
from gracetune.models.loading import build_component, load_component, load_text_model
from gracetune.models.source import ModelSource
from gracetune.models.spec import PartPlacement
from gracetune.storage.safetensors_headers import WeightFileError
from unit.models.model_inputs import answer

CPU = torch.device("cpu")
FLAVOURS = [
    ("wan", "t2v-14b-2.2"),
    ("wan", "ti2v-5b-2.2"),
    ("wan", "i2v-14b-480p-2.1"),
    ("qwen_image", "t2i"),
    ("flux", "dev"),
    ("sdxl", "base-1.0"),
    ("stable_audio", "open-1.0"),
    ("flux2", "dev"),
    ("z_image", "base"),
    ("krea2", "raw"),
]
DiffusersModel = diffusers.ModelMixin
TinyModel = Callable[[str, str], Path]


def source_of(folder: Path, **options: Any) -> ModelSource:
    return ModelSource(str(folder), folder, **options)


def parts(source: ModelSource, library: str, base: type) -> dict[str, Any]:
    """The classes of a model's parts that come from one library."""
    named = index_parts(read_index(source))
    home = {"diffusers": diffusers, "transformers": transformers}[library]
    classes = {name: getattr(home, cls) for name, (found, cls) in named.items() if found == library}
    return {name: cls for name, cls in classes.items() if issubclass(cls, base)}


def same_bytes(first: Tensor, second: Tensor) -> bool:
    raw = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (first, second)]
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(*raw)


def assert_same_model(ours: nn.Module, theirs: nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        mine, other = dict(getattr(ours, kind)()), dict(getattr(theirs, kind)())
        assert mine.keys() == other.keys()
        assert [name for name in mine if not same_bytes(mine[name], other[name])] == []


@pytest.mark.parametrize(("family", "flavour"), FLAVOURS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)])
def test_every_part_equals_diffusers_own_loading(
    tiny_model: TinyModel, family: str, flavour: str, dtype: torch.dtype
) -> None:
    source = source_of(tiny_model(family, flavour))
    found = parts(source, "diffusers", diffusers.ModelMixin)
    assert "vae" in found
    assert len(found) >= 2
    for component, cls in found.items():
        ours = load_component(source, component, cls, PartPlacement(CPU, dtype))
        theirs = cls.from_pretrained(source.folder / component, torch_dtype=dtype)
        assert_same_model(ours, theirs)
        assert not ours.training
        assert not any(parameter.requires_grad for parameter in ours.parameters())
        if dtype != torch.float16:  # too slow on a CPU
            for parameter in theirs.parameters():
                # diffusers' weights lie in the mapped file, at odd addresses where BLAS adds up in another order.
                parameter.data = parameter.data.clone()
            assert same_bytes(answer(ours, dtype), answer(theirs, dtype))


def test_stable_audios_projection_and_weights_made_of_two(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model("stable_audio", "open-1.0"))
    cls = diffusers.StableAudioProjectionModel
    ours = load_component(source, "projection_model", cls, PartPlacement(CPU, torch.float32))
    assert_same_model(ours, cls.from_pretrained(source.folder / "projection_model"))
    vae = load_component(source, "vae", diffusers.AutoencoderOobleck, PartPlacement(CPU, torch.float32))
    norm_output = [module for module in vae.modules() if hasattr(module, "weight_g")]
    assert norm_output
    assert {module.weight.device.type for module in norm_output} == {"cpu"}
    copy.deepcopy(vae)  # torch rejects that while a computed weight hangs on a graph


def test_wan_keeps_its_float32_layers(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model("wan", "t2v-14b-2.2"))
    model = load_component(source, "transformer", WanTransformer3DModel, PartPlacement(CPU, torch.bfloat16))
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes["blocks.0.attn1.to_q.weight"] == torch.bfloat16
    assert dtypes["condition_embedder.time_embedder.linear_1.weight"] == torch.float32
    assert dtypes["scale_shift_table"] == torch.float32
    assert dtypes["blocks.0.norm2.weight"] == torch.float32
    rope = dict(model.named_buffers())
    assert rope["rope.freqs_cos"].dtype == torch.float32
    assert float(rope["rope.freqs_cos"].abs().max()) == 1.0


@pytest.mark.parametrize(("family", "flavour"), FLAVOURS[::3], ids=str)
def test_meta_build_has_all_names_and_no_memory(tiny_model: TinyModel, family: str, flavour: str) -> None:
    source = source_of(tiny_model(family, flavour))
    component, cls = next(iter(parts(source, "diffusers", diffusers.ModelMixin).items()))
    built = build_component(source, component, cls)
    loaded = load_component(source, component, cls, PartPlacement(CPU, torch.float32))
    assert [(name, p.shape) for name, p in built.named_parameters()] == [
        (name, p.shape) for name, p in loaded.named_parameters()
    ]
    assert {tensor.device.type for tensor in [*built.parameters(), *built.buffers()]} == {"meta"}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(("family", "flavour"), FLAVOURS, ids=str)
def test_text_models_equal_transformers_own_loading(tiny_model: TinyModel, family: str, flavour: str) -> None:
    source = source_of(tiny_model(family, flavour))
    found = parts(source, "transformers", transformers.PreTrainedModel)
    assert found
    for component, cls in found.items():
        ours = load_text_model(source, component, cls, PartPlacement(CPU, torch.bfloat16))
        theirs = cls.from_pretrained(source.folder / component, dtype=torch.bfloat16)
        assert_same_model(ours, theirs)
        assert not ours.training
        assert not any(parameter.requires_grad for parameter in ours.parameters())


# -- shards, variants, old names, ties --------------------------------------------------------------------------------


@pytest.fixture
def unet_folder(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A copy of a tiny SDXL to change."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("sdxl", "base-1.0"), folder)
    return folder


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_sharded_weights_and_variants(unet_folder: Path, variant: str | None) -> None:
    theirs = UNet2DConditionModel.from_pretrained(unet_folder / "unet")
    shutil.rmtree(unet_folder / "unet")
    with torch.no_grad():
        next(iter(theirs.parameters())).add_(1.0)  # other weights than a plain file beside it would have
    theirs.save_pretrained(unet_folder / "unet", max_shard_size="500KB", variant=variant)
    source = source_of(unet_folder, variant=variant)
    assert weight_file(source, "unet").suffix == ".json"
    assert len({one.path for one in part_tensors(source, "unet")}) > 1
    assert_same_model(load_component(source, "unet", UNet2DConditionModel, PartPlacement(CPU, torch.float32)), theirs)


def test_part_without_the_variant_uses_its_plain_file(unet_folder: Path) -> None:
    source = source_of(unet_folder, variant="fp16")
    assert weight_file(source, "vae").name == "diffusion_pytorch_model.safetensors"


def test_attention_blocks_under_their_first_names(unet_folder: Path) -> None:
    file = unet_folder / "vae" / "diffusion_pytorch_model.safetensors"
    theirs = AutoencoderKL.from_pretrained(unet_folder / "vae")
    old = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
    renamed = {}
    for name, tensor in load_file(file).items():
        for new, first in old.items():
            name = name.replace(new, first) if "mid_block.attentions" in name else name
        renamed[name] = tensor
    save_file(renamed, file)
    assert any(".proj_attn." in name for name in renamed)
    assert_same_model(
        load_component(source_of(unet_folder), "vae", AutoencoderKL, PartPlacement(CPU, torch.float32)), theirs
    )


def test_ignorable_tensors_are_skipped(tiny_model: TinyModel, tmp_path: Path) -> None:
    shutil.copytree(tiny_model("wan", "i2v-14b-480p-2.1"), tmp_path / "model")
    file = tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({**load_file(file), "blocks.0.attn2.norm_added_q.weight": torch.ones(3)}, file)  # as published
    source = source_of(tmp_path / "model")
    ours = load_component(source, "transformer", WanTransformer3DModel, PartPlacement(CPU, torch.float32))
    assert_same_model(ours, WanTransformer3DModel.from_pretrained(file.parent))


class Tied(diffusers.ModelMixin, diffusers.ConfigMixin):  # type: ignore[misc]
    """Two layers, one parameter."""

    config_name = "config.json"

    @diffusers.configuration_utils.register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight
        self.exact = nn.Parameter(torch.randn(width, dtype=torch.float64))
        self.counts = nn.Parameter(torch.arange(width), requires_grad=False)
        self.register_buffer("saved", torch.zeros(width))
        self.register_buffer("computed", torch.arange(width) * 0.5, persistent=False)


@pytest.mark.parametrize("names", [("first.weight",), ("second.weight",), ("first.weight", "second.weight")])
def test_tied_parameters_stay_tied(tmp_path: Path, names: tuple[str, ...]) -> None:
    part = tmp_path / "transformer"
    part.mkdir()
    (part / "config.json").write_text(json.dumps({"_class_name": "Tied", "width": 4}))
    weight = torch.randn(4, 4)
    save_file(
        {
            **{name: weight.clone() for name in names},
            "exact": torch.full((4,), 1 / 3, dtype=torch.float64),
            "counts": torch.tensor([3, 2, 1, 0]),
            "saved": torch.ones(4),
        },
        part / "diffusion_pytorch_model.safetensors",
    )
    model: Any = load_component(source_of(tmp_path), "transformer", Tied, PartPlacement(CPU, torch.float32))
    assert model.first.weight is model.second.weight
    assert torch.equal(model.first.weight, weight)
    assert torch.equal(model.saved, torch.ones(4))
    assert model.counts.tolist() == [3, 2, 1, 0]
    assert model.exact.dtype == torch.float32
    state = torch.get_rng_state()
    half = load_component(source_of(tmp_path), "transformer", Tied, PartPlacement(CPU, torch.bfloat16))
    assert torch.equal(torch.get_rng_state(), state)
    if len(names) == 2:  # of a parameter that is stored once, diffusers leaves the other name on meta
        theirs = Tied.from_pretrained(part, torch_dtype=torch.bfloat16).state_dict()
        assert [name for name, tensor in half.state_dict().items() if not same_bytes(tensor, theirs[name])] == []
    assert model.computed.tolist() == [0.0, 0.5, 1.0, 1.5]


# -- rejections -------------------------------------------------------------------------------------------------------


def load_unet(folder: Path) -> nn.Module:
    return load_component(source_of(folder), "unet", UNet2DConditionModel, PartPlacement(CPU, torch.float32))


def edit_unet(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_misspelt_tensor_is_reported_with_the_closest_name(unet_folder: Path) -> None:
    edit_unet(unet_folder, lambda tensors: tensors.update({"conv_inn.weight": tensors.pop("conv_in.weight")}))
    with pytest.raises(WeightFileError) as rejected:
        load_unet(unet_folder)
    by_key = {problem.key: problem for problem in rejected.value.problems}
    assert by_key["conv_in.weight"].hint == "is it 'conv_inn.weight'?"
    assert by_key["conv_inn.weight"].found == "a tensor without a destination"


def test_a_tensor_of_another_shape(unet_folder: Path) -> None:
    edit_unet(unet_folder, lambda tensors: tensors.update({"conv_in.bias": torch.zeros(3)}))
    with pytest.raises(WeightFileError, match=r"conv_in.bias\n  found     shape \(3,\)"):
        load_unet(unet_folder)


def test_a_value_float16_cannot_hold(unet_folder: Path) -> None:
    edit_unet(unet_folder, lambda tensors: tensors["conv_in.bias"].fill_(1e6))
    source = source_of(unet_folder)
    with pytest.raises(WeightFileError, match="the value 1e\\+06"):
        load_component(source, "unet", UNet2DConditionModel, PartPlacement(CPU, torch.float16))


def test_a_truncated_file(unet_folder: Path) -> None:
    file = unet_folder / "unet" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightFileError, match="truncated"):
        load_unet(unet_folder)


def test_another_class_than_the_config_says(unet_folder: Path) -> None:
    with pytest.raises(ConfigError, match="UNet2DConditionModel\n  expected  WanTransformer3DModel"):
        load_component(source_of(unet_folder), "unet", WanTransformer3DModel, PartPlacement(CPU, torch.float32))


@pytest.mark.parametrize("quantized", [{"quant_method": "bitsandbytes"}, "bitsandbytes"])
def test_quantized_weights_are_rejected(unet_folder: Path, quantized: object) -> None:
    file = unet_folder / "unet" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantized}))
    with pytest.raises(ConfigError, match="quantized by bitsandbytes"):
        load_unet(unet_folder)


def test_pickled_weights_are_not_read(unet_folder: Path) -> None:
    (unet_folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    torch.save({}, unet_folder / "unet" / "diffusion_pytorch_model.bin")
    with pytest.raises(WeightFileError, match=r"only pickled weights \(diffusion_pytorch_model.bin\)"):
        load_unet(unet_folder)


def test_a_missing_part_and_a_broken_configuration(unet_folder: Path) -> None:
    source = source_of(unet_folder)
    with pytest.raises(ConfigError, match="No such file"):
        read_config(source, "transformer")
    (unet_folder / "unet" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="invalid JSON"):
        read_config(source, "unet")
    (unet_folder / "unet" / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="found     a list"):
        read_config(source, "unet")
    shutil.rmtree(unet_folder / "vae")
    with pytest.raises(WeightFileError, match="no such folder"):
        weight_file(source, "vae")


@pytest.mark.parametrize(("family", "flavour"), FLAVOURS[::3], ids=str)
def test_on_the_meta_device_nothing_is_read(tiny_model: TinyModel, tmp_path: Path, family: str, flavour: str) -> None:
    source = source_of(tmp_path / "model")
    shutil.copytree(tiny_model(family, flavour), source.folder, ignore=shutil.ignore_patterns("*.safetensors"))
    placement = PartPlacement(torch.device("meta"), torch.bfloat16)
    models = [load_component(source, *part, placement) for part in parts(source, "diffusers", DiffusersModel).items()]
    texts = parts(source, "transformers", transformers.PreTrainedModel)
    models += [load_text_model(source, *part, placement) for part in texts.items()]
    assert len(models) >= 3
    assert {tensor.device.type for model in models for tensor in model.parameters()} == {"meta"}


def test_text_weights_of_another_shape(unet_folder: Path) -> None:
    file = unet_folder / "text_encoder" / "model.safetensors"
    tensors = load_file(file)
    changed = next(name for name in tensors if name.endswith("fc1.weight"))
    save_file({**tensors, changed: torch.zeros(3, 3)}, file, {"format": "pt"})
    with pytest.raises(WeightFileError, match=r"fc1\.weight\n.*shape \(3, 3\)\n.*as config.json says"):
        load_text_model(
            source_of(unet_folder), "text_encoder", transformers.CLIPTextModel, PartPlacement(CPU, torch.float32)
        )


def test_text_weights_of_another_model(unet_folder: Path) -> None:
    file = unet_folder / "text_encoder" / "model.safetensors"
    tensors = load_file(file)
    dropped = next(name for name in tensors if name.endswith("fc1.weight"))
    del tensors[dropped]
    save_file(tensors, file, {"format": "pt"})
    cls = transformers.CLIPTextModel
    with pytest.raises(WeightFileError, match=r"fc1.weight\n  found     no tensor of this name"):
        load_text_model(source_of(unet_folder), "text_encoder", cls, PartPlacement(CPU, torch.float32))
