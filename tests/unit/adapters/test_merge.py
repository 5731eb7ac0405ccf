from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel, WanTransformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from gracetune.adapters.merge import STEM, Weighted, merge_into, merge_module
from gracetune.adapters.state import AdapterState, Layer
from gracetune.errors import ConfigError, GracetuneError
from unit.adapters.denoisers import Denoiser, TinyModel, load, shake

CLASSES = {
    "wan": (WanTransformer3DModel, "t2v-14b-2.2", "transformer"),
    "sdxl": (UNet2DConditionModel, "base-1.0", "unet"),
}


def source(tiny_model: TinyModel, family: str) -> Path:
    _, flavour, part = CLASSES[family]
    return tiny_model(family, flavour) / part


def adapter(tiny_model: TinyModel, family: str, kind: str, seed: int = 7) -> AdapterState:
    attached = load(tiny_model, family).attach(kind)
    shake(attached, seed=seed)
    return attached.state()


def reload(family: str, folder: Path) -> Denoiser:
    return Denoiser(family, CLASSES[family][0].from_pretrained(folder).eval())


def one_layer(path: str = "blocks.0.attn1.to_q", rows: int = 32) -> AdapterState:
    layer = Layer("lora", {"lora_A.weight": torch.ones(1, 32), "lora_B.weight": torch.ones(rows, 1)}, 1.0, 1)
    return AdapterState("wan", "", {path: layer})


class TestFolder:
    @pytest.mark.parametrize("family", CLASSES)
    @pytest.mark.parametrize("kind", ["lokr", "dora", "full_delta"])
    def test_diffusers_loads_what_was_trained(
        self, tiny_model: TinyModel, tmp_path: Path, family: str, kind: str
    ) -> None:
        denoiser = load(tiny_model, family)
        attached = denoiser.attach(kind)
        shake(attached)
        report = merge_into(attached.state(), source(tiny_model, family), tmp_path / "new" / "merged")
        assert report.files == (f"{STEM}.safetensors",)
        merged = reload(family, tmp_path / "new" / "merged")
        with torch.no_grad():
            torch.testing.assert_close(merged(), denoiser(), rtol=1e-5, atol=1e-5)
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["merged"]

    def test_shards(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        state = adapter(tiny_model, "wan", "lokr")
        whole = merge_into(state, source(tiny_model, "wan"), tmp_path / "whole")
        report = merge_into(state, source(tiny_model, "wan"), tmp_path / "parts", shard_bytes=40_000)
        assert len(report.files) > 3
        assert all((tmp_path / "parts" / name).stat().st_size < 60_000 for name in report.files)
        one, parts = (reload("wan", tmp_path / name).model.state_dict() for name in ("whole", "parts"))
        assert all(torch.equal(tensor, parts[name]) for name, tensor in one.items())
        again = merge_into(state, tmp_path / "parts", tmp_path / "again")  # and from shards
        assert again.tensors == whole.tensors == report.tensors

    def test_untouched_tensors_and_every_precision_stay(self, tmp_path: Path) -> None:
        folder = tmp_path / "base"
        folder.mkdir()
        tensors = {
            "half.weight": torch.randn(32, 32, dtype=torch.float16),
            "brain.weight": torch.randn(32, 32, dtype=torch.bfloat16),
            "full.weight": torch.randn(32, 32),
            "other.weight": torch.randn(3, dtype=torch.bfloat16),
            "empty": torch.zeros(0, 4),
            "count": torch.tensor(7),
        }
        save_file(tensors, folder / f"{STEM}.safetensors")
        layers = {path: one_layer().layers["blocks.0.attn1.to_q"] for path in ("half", "brain", "full")}
        report = merge_into(AdapterState("wan", "", layers), folder, tmp_path / "out")
        merged = load_file(tmp_path / "out" / f"{STEM}.safetensors")
        assert set(report.changed) == {"half.weight", "brain.weight", "full.weight"}
        for name, tensor in tensors.items():
            assert merged[name].dtype == tensor.dtype
            expected = (tensor.float() + 1).to(tensor.dtype) if name in report.changed else tensor
            assert torch.equal(merged[name], expected)
        with safe_open(tmp_path / "out" / f"{STEM}.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}

    def test_one_tensor_at_a_time(self, tmp_path: Path) -> None:
        """96 MiB in 24 tensors through a process that may grow by much less."""
        folder = tmp_path / "base"
        folder.mkdir()
        save_file(
            {f"layer{index}.weight": torch.zeros(1024, 1024) for index in range(24)}, folder / f"{STEM}.safetensors"
        )
        layer = Layer("lora", {"lora_A.weight": torch.ones(1, 1024), "lora_B.weight": torch.ones(1024, 1)}, 1.0, 1)
        merge_into(AdapterState("wan", "", {"layer0": layer}), folder, tmp_path / "warm")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        state = AdapterState("wan", "", {f"layer{index}": layer for index in range(24)})
        merge_into(state, folder, tmp_path / "out")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 48 * 1024  # KiB

    def test_an_existing_folder_is_never_touched(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        with pytest.raises(ConfigError, match="does not exist yet"):
            merge_into(one_layer(), source(tiny_model, "wan"), tmp_path / "out")
        assert not any((tmp_path / "out").iterdir())

    def test_a_disk_that_fills_up_leaves_nothing(self, tmp_path: Path) -> None:
        folder = tmp_path / "base"
        folder.mkdir()
        weights = {"blocks.0.attn1.to_q.weight": torch.zeros(32, 32), "large": torch.zeros(1024, 1024)}
        save_file(weights, folder / f"{STEM}.safetensors")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
        try:
            with pytest.raises(GracetuneError, match="cannot be written: File too large"):
                merge_into(one_layer(), folder, tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [path.name for path in tmp_path.iterdir()] == ["base"]

    def test_a_place_that_cannot_be(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("where a folder is needed")
        with pytest.raises(GracetuneError, match="cannot be written"):
            merge_into(one_layer(), source(tiny_model, "wan"), tmp_path / "file" / "out")

    def test_quantized_weights_are_rejected(self, tmp_path: Path) -> None:
        folder = tmp_path / "base"
        folder.mkdir()
        weight = torch.zeros(32, 32).to(torch.float8_e4m3fn)
        save_file({"blocks.0.attn1.to_q.weight": weight}, folder / f"{STEM}.safetensors")
        with pytest.raises(ConfigError, match="F8_E4M3"):
            merge_into(one_layer(), folder, tmp_path / "out")

    def test_what_the_precision_cannot_hold_is_rejected_and_nothing_written(self, tmp_path: Path) -> None:
        folder = tmp_path / "base"
        folder.mkdir()
        save_file({"first.weight": torch.zeros(32, 32), "half.weight": torch.full((32, 32), 60000.0).half()},
                  folder / f"{STEM}.safetensors")  # fmt: skip
        layer = one_layer().layers["blocks.0.attn1.to_q"]
        large = replace(layer, alpha=6000.0)
        with pytest.raises(ConfigError, match=r"half\.weight[\s\S]*float16"):
            merge_into(AdapterState("wan", "", {"first": layer, "half": large}), folder, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["base"]

    def test_no_weights_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="give the folder of the denoiser"):
            merge_into(one_layer(), tmp_path, tmp_path / "out")

    @pytest.mark.parametrize("shape", [(4, 3, 2), (4, 6), (24,)])
    def test_as_many_numbers_in_another_shape(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        """Inputs and kernel the other way round would be merged without an error, and wrongly."""
        folder = tmp_path / "base"
        folder.mkdir()
        save_file({"layer.weight": torch.zeros(shape)}, folder / f"{STEM}.safetensors")
        layer = Layer("full_delta", {"diff": torch.ones(4, 2, 3)}, 1.0, None)
        with pytest.raises(ConfigError, match="merge into the model it was trained on"):
            merge_into(AdapterState("wan", "", {"layer": layer}), folder, tmp_path / "out")

    @pytest.mark.parametrize("state", [one_layer("no.such.layer"), one_layer(rows=33)])
    def test_another_models_adapter(self, tiny_model: TinyModel, tmp_path: Path, state: AdapterState) -> None:
        with pytest.raises(ConfigError, match="merge into the model it was trained on"):
            merge_into(state, source(tiny_model, "wan"), tmp_path / "out")
        assert not any(tmp_path.iterdir())


class TestModule:
    def test_several_add_up(self, tiny_model: TinyModel) -> None:
        first, second = adapter(tiny_model, "wan", "lora"), adapter(tiny_model, "wan", "lokr", seed=8)
        together, one_by_one = load(tiny_model, "wan"), load(tiny_model, "wan")
        names = merge_module([first, Weighted(second, 0.5)], together.model)
        merge_module(first, one_by_one.model)
        merge_module(Weighted(second, 0.5), one_by_one.model)
        torch.testing.assert_close(together(), one_by_one())
        assert len(names) == 20

    def test_the_strength_is_the_biass_too(self) -> None:
        model = torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 3)})
        weight, bias = (one.detach().clone() for one in model["layer"].parameters())
        layer = Layer("full_delta", {"diff": torch.ones(3, 2), "diff_b": torch.ones(3)}, 1.0, None)
        merge_module(Weighted(AdapterState("wan", "", {"layer": layer}), 0.5), model)
        torch.testing.assert_close(model["layer"].weight.detach(), weight + 0.5)
        torch.testing.assert_close(model["layer"].bias.detach(), bias + 0.5)

    def test_there_and_back(self, tiny_model: TinyModel) -> None:
        state, denoiser = adapter(tiny_model, "wan", "loha"), load(tiny_model, "wan")
        base = denoiser()
        merge_module(state, denoiser.model)
        assert (denoiser() - base).abs().max() > 1e-2
        merge_module(Weighted(state, -1.0), denoiser.model)
        torch.testing.assert_close(denoiser(), base, rtol=1e-5, atol=1e-5)

    def test_nothing_is_changed_when_one_layer_does_not_fit(self, tiny_model: TinyModel) -> None:
        state, denoiser = adapter(tiny_model, "wan", "lora"), load(tiny_model, "wan")
        base = denoiser()
        wrong = replace(state, layers={**state.layers, **one_layer("no.such.layer").layers})
        with pytest.raises(ConfigError, match=r"no\.such\.layer\.weight"):
            merge_module(wrong, denoiser.model)
        assert torch.equal(denoiser(), base)


def test_a_rotation_beyond_the_range_of_numbers_is_rejected() -> None:
    """1 - Q can always be inverted on paper. Here fp32 rounds the 1 away; what is left has an odd number of rows and is
    singular. The entries are powers of two, so that every LAPACK finds a pivot of exactly 0."""
    blocks = torch.full((2, 3, 3), 2.0**100).triu(1)
    state = AdapterState("wan", "", {"a": Layer("diag_oft", {"oft_blocks": blocks}, 1.0, None)})
    model = nn.ModuleDict({"a": nn.Linear(4, 6)})
    before = model["a"].weight.clone()
    with pytest.raises(ConfigError, match="beyond the range of numbers"):
        merge_module(state, model)
    assert torch.equal(model["a"].weight, before)
