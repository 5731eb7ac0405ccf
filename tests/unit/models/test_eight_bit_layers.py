"""Denoisers whose large matrices are rounded to fp8 while they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gracetune.config.run_config import Model
from gracetune.errors import ConfigError
from gracetune.models import eight_bit_layers as eight_bits
from gracetune.models.eight_bit_layers import eight_bit_line, eight_bit_weights, groups
from gracetune.models.eight_bit_linear import EightBitLinear, Fp8Linear, Int8Linear, check_fp8
from gracetune.models.footprint import Footprint
from gracetune.models.loading import load_component
from gracetune.models.registry import FOOTPRINTS, build_published, spec_of
from gracetune.models.source import ModelSource, open_source
from gracetune.models.spec import EightBitLayers, PartPlacement
from gracetune.storage.safetensors_headers import WeightFileError
from unit.models import original_names as original
from unit.models.model_inputs import answer

CPU = torch.device("cpu")
FAMILIES = ("wan", "qwen_image", "flux", "flux2", "z_image", "krea2", "sdxl", "stable_audio")
TinyModel = Callable[[str, str], Path]


def flavour_of(family: str) -> str:
    return FOOTPRINTS[family][0].flavour  # type: ignore[index]


def loaded(folder: Path, family: str, fp8: bool = True, **options: Any) -> nn.Module:
    spec, source = spec_of(family), ModelSource("tiny", folder)
    layers = EightBitLayers(spec.default_targets, **options) if fp8 else None
    return spec.load_denoiser(
        source, spec.inspect(source).experts[0], PartPlacement(CPU, torch.bfloat16, eight_bits=layers)
    )


def rounded(model: nn.Module, cls: type[EightBitLinear] = Fp8Linear) -> dict[str, EightBitLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, cls)}


@pytest.mark.parametrize("family", FAMILIES)
def test_only_a_familys_large_matrices_are_quantized(tiny_model: TinyModel, family: str) -> None:
    folder = tiny_model(family, flavour_of(family))
    ours, theirs = loaded(folder, family), loaded(folder, family, fp8=False)
    layers = rounded(ours)
    assert layers
    left = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        path = name.removesuffix(".weight")
        if path in layers and name.endswith(".weight"):
            assert torch.allclose(layers[path].weight.float(), parameter.float(), rtol=0.07, atol=1e-3)
        else:
            assert torch.equal(left.pop(name), parameter), name
    assert not left
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    assert not ours.training
    assert not any(tensor.is_meta for tensor in (*ours.parameters(), *ours.buffers()))
    found, wanted = answer(ours, torch.bfloat16).double(), answer(theirs, torch.bfloat16).double()
    assert (found - wanted).norm() / wanted.norm() < 0.1


@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_int8_is_closer_than_fp8(tiny_model: TinyModel, family: str) -> None:
    folder = tiny_model(family, flavour_of(family))
    ours, theirs = loaded(folder, family, kind="int8"), loaded(folder, family, fp8=False)
    layers, parameters = rounded(ours, Int8Linear), dict(theirs.named_parameters())
    assert layers.keys() >= rounded(loaded(folder, family)).keys()
    for path, layer in layers.items():
        step = layer.get_buffer("int8_scales")
        assert ((layer.weight.float() - parameters[f"{path}.weight"].float()).abs() <= step).all()
    found, wanted = answer(ours, torch.bfloat16).double(), answer(theirs, torch.bfloat16).double()
    assert (found - wanted).norm() / wanted.norm() < 0.03
    line = eight_bit_line(ours, spec_of(family).default_targets)
    assert line.startswith(f"base weights: int8 for {len(layers)} layers")


@pytest.mark.parametrize("family", FAMILIES)
def test_published_models_quantize_what_the_plan_counts(family: str) -> None:
    footprint: Footprint = FOOTPRINTS[family][0]  # type: ignore[index]
    model = build_published(family, footprint.flavour)  # type: ignore[arg-type]
    names = eight_bit_weights(model, EightBitLayers(spec_of(family).default_targets))
    held = sum(model.get_parameter(name).numel() for name in names)
    assert held == footprint.linear_weights


class TestLayers:
    def test_unsupported_sides_are_not_quantized_with_a_reason(self) -> None:
        model = nn.ModuleDict({"fits": nn.Linear(32, 48), "odd": nn.Linear(32, 24), "other": nn.Linear(32, 32)})
        patterns = ("fits", "odd")
        assert eight_bit_weights(model, EightBitLayers(patterns)) == {"fits.weight"}
        put = eight_bits.put_into(model, EightBitLayers(patterns, "one"), CPU)
        put("fits.weight", torch.ones(48, 32))
        line = eight_bit_line(model, patterns)
        assert "fp8 for 1 layers" in line
        assert "in one layout" in line
        assert "1 are not quantized" in line

    def test_shared_and_exact_layers_are_not_quantized(self) -> None:
        model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16), "norm": nn.ModuleDict()})
        model["b"].weight = model["a"].weight
        model["norm"]["c"] = nn.Linear(16, 16)
        model["d"] = nn.Linear(16, 16)
        assert eight_bit_weights(model, EightBitLayers(("*",)), exact=["norm"]) == {"d.weight"}

    def test_no_layer_at_all_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match="without any layer it applies to"):
            eight_bit_weights(nn.ModuleDict({"a": nn.Linear(16, 16)}), EightBitLayers(("blocks.*.to_q",)))

    def test_groups_are_bounded_except_for_a_larger_weight(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(eight_bits, "AT_ONCE", 10)
        assert [*groups({"a": 4, "b": 6, "c": 1, "d": 30, "e": 2})] == [["a", "b"], ["c"], ["d"], ["e"]]
        assert [*groups({})] == []

    def test_cpu_computes_the_same(self) -> None:
        check_fp8(CPU)


class TestReading:
    def test_at_most_one_group_is_in_memory_unquantized(
        self, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every weight of the blocks that is not fp8 yet, counted whenever memory is requested."""
        monkeypatch.setattr(eight_bits, "AT_ONCE", 1)
        folder = tiny_model("wan", "t2v-14b-2.2")
        whole = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
        largest = max(whole[name].nbytes for name in whole if ".ffn." in name or ".attn" in name)
        alive: list[int] = []
        put_into = eight_bits.load_into

        def counted(weights: Any, destinations: dict[str, Tensor], **options: Any) -> Any:
            alive.append(sum(one.nbytes for one in destinations.values()))
            return put_into(weights, destinations, **options)

        monkeypatch.setattr(eight_bits, "load_into", counted)
        progress: list[tuple[int, int]] = []
        spec, source = spec_of("wan"), ModelSource("tiny", folder)
        cls = type(spec.build_denoiser(source, spec.inspect(source).experts[0]))
        model = load_component(
            source, "transformer", cls, PartPlacement(CPU, torch.bfloat16,
            eight_bits=EightBitLayers(spec.default_targets)),
            progress=lambda done, total: progress.append((done, total)),
        )  # fmt: skip
        assert len(alive) == len(rounded(model)) == 20
        assert max(alive) == largest
        done = [one for one, _ in progress]
        assert done == sorted(done)
        assert progress[-1][0] == progress[-1][1] == sum(tensor.nbytes for tensor in whole.values())

    def test_file_in_another_precision_is_quantized_once(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        folder = tiny_model("wan", "t2v-14b-2.2")
        whole = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
        assert whole["blocks.0.ffn.net.2.weight"].dtype == torch.float32
        layer = rounded(loaded(folder, "wan"))["blocks.0.ffn.net.2"]
        again = Fp8Linear(whole["blocks.0.ffn.net.2.weight"], None)
        assert torch.equal(layer.fp8_values.view(torch.uint8), again.fp8_values.view(torch.uint8))
        assert torch.equal(layer.fp8_scales, again.fp8_scales)

    def test_all_problems_are_reported_before_reading(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        folder = tmp_path / "wan"
        folder.mkdir()
        given = tiny_model("wan", "t2v-14b-2.2")
        for part in given.iterdir():
            if part.name != "transformer":
                (folder / part.name).symlink_to(part)
        (folder / "transformer").mkdir()
        (folder / "transformer" / "config.json").symlink_to(given / "transformer" / "config.json")
        tensors = load_file(given / "transformer" / "diffusion_pytorch_model.safetensors")
        del tensors["blocks.0.attn1.to_q.weight"]
        tensors["blocks.1.attn1.to_q.weight"] = tensors["blocks.1.attn1.to_q.weight"][:-1].contiguous()
        del tensors["patch_embedding.bias"]
        save_file(tensors, folder / "transformer" / "diffusion_pytorch_model.safetensors")
        with pytest.raises(WeightFileError) as caught:
            loaded(folder, "wan")
        message = {problem.key for problem in caught.value.problems}
        assert message == {"blocks.0.attn1.to_q.weight", "blocks.1.attn1.to_q.weight", "patch_embedding.bias"}

    def test_a_single_file_of_the_authors_names(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        import shutil

        folder = tmp_path / "wan"
        shutil.copytree(tiny_model("wan", "t2v-1.3b-2.1"), folder)
        tensors = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
        save_file(original.renamed(tensors, original.wan), folder / "wan2.1.safetensors")
        spec = spec_of("wan")
        source = open_source(Model(family="wan", path=str(folder / "wan2.1.safetensors")))
        placement = PartPlacement(CPU, torch.bfloat16, eight_bits=EightBitLayers(spec.default_targets))
        model = spec.load_denoiser(source, spec.inspect(source).experts[0], placement)
        expected = loaded(folder, "wan")
        assert rounded(model).keys() == rounded(expected).keys()
        assert torch.equal(answer(model, torch.bfloat16), answer(expected, torch.bfloat16))
