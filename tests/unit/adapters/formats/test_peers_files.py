"""Files that PEFT and ai-toolkit save, read by us, give the model they had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn

from gracetune.adapters import delta
from gracetune.adapters.adapter_files import open_adapter
from gracetune.adapters.errors import BrokenLayerError
from unit.adapters.formats import making
from unit.adapters.formats.predicting import predict
from unit.adapters.formats.test_diffusers_loads import merged

LINEAR = ["to_q", "to_v"]
OF_PEFT: dict[str, Any] = {
    "lokr of whole factors": LoKrConfig(r=8, alpha=4, target_modules=LINEAR),
    "lokr of a decomposed factor": LoKrConfig(r=1, alpha=3, decompose_factor=2, target_modules=LINEAR),
    "lokr of two decomposed factors": LoKrConfig(r=1, alpha=3, decompose_both=True, target_modules=LINEAR),
    "lokr of several ranks and alphas": LoKrConfig(
        r=8, alpha=4, rank_pattern={"to_q": 16}, alpha_pattern={"^.*attn2.to_v": 12}, target_modules=LINEAR
    ),
    "loha": LoHaConfig(r=4, alpha=6, target_modules=LINEAR),
    "loha of several alphas": LoHaConfig(r=4, alpha=6, alpha_pattern={"attn1.to_q": 2}, target_modules=LINEAR),
}
OF_CONVOLUTIONS: dict[str, Any] = {
    "lokr": LoKrConfig(r=8, alpha=4, target_modules=["conv1"]),
    "decomposed lokr": LoKrConfig(r=1, alpha=4, target_modules=["conv1"]),
    "lokr in Tucker form": LoKrConfig(r=1, alpha=4, use_effective_conv2d=True, target_modules=["conv1"]),
    "loha": LoHaConfig(r=2, alpha=3, target_modules=["conv1"]),
    "loha in Tucker form": LoHaConfig(r=2, alpha=3, use_effective_conv2d=True, target_modules=["conv1"]),
}


def saved_by_peft(family: str, config: Any, tiny_model: Any, folder: Path) -> Tensor:
    """The folder, and what the model then predicts."""
    model = making.denoiser(family, tiny_model(family, making.FLAVOURS[family]))
    base = predict(family, model)
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lokr_" in name or "hada_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    expected = predict(family, adapted.base_model.model)
    adapted.save_pretrained(folder)
    assert (expected - base).abs().max() > 1e-4
    return expected


@pytest.mark.parametrize("kind", OF_PEFT)
@pytest.mark.parametrize(
    "family", ["wan", *(pytest.param(one, marks=pytest.mark.full) for one in making.FLAVOURS if one != "wan")]
)
def test_we_read_lokr_and_loha_of_peft(family: str, kind: str, tiny_model: Any, tmp_path: Path) -> None:
    expected = saved_by_peft(family, OF_PEFT[kind], tiny_model, tmp_path)
    opened = open_adapter(tmp_path, family)
    assert opened.detected.format == "diffusers"
    torch.testing.assert_close(merged(family, tiny_model, opened.state()), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("kind", OF_CONVOLUTIONS)
def test_we_read_convolutions_of_peft(kind: str, tiny_model: Any, tmp_path: Path) -> None:
    expected = saved_by_peft("sdxl", OF_CONVOLUTIONS[kind], tiny_model, tmp_path)
    opened = open_adapter(tmp_path, "sdxl")
    torch.testing.assert_close(merged("sdxl", tiny_model, opened.state()), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "expected_text"),
    [
        (None, "alpha / r"),
        ({"r": 0}, "r in adapter_config.json"),
        ({"alpha": "4"}, 'the text "4"'),
        ({"rank_pattern": {"(to_q*)*": 2}}, "rank_pattern"),
    ],
)
def test_a_lokr_of_peft_without_its_scale_is_rejected(
    change: Any, expected_text: str, tiny_model: Any, tmp_path: Path
) -> None:
    saved_by_peft("wan", OF_PEFT["lokr of whole factors"], tiny_model, tmp_path)
    config = tmp_path / "adapter_config.json"
    if change is None:
        config.unlink()
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(BrokenLayerError, match=expected_text):
        open_adapter(tmp_path / "adapter_model.safetensors", "wan").state()


# -- ai-toolkit's DoRA (toolkit/models/DoRA.py and toolkit/network_mixins.py at 27a03a9) -------------------------------


def recorded() -> dict[str, Tensor]:
    """A layer of its module, an input, and the output, made by scripts/peer_vectors/aitoolkit_dora.py."""
    file = Path(__file__).parents[3] / "golden" / "fidelity" / "aitoolkit" / "dora.json"
    return {name: torch.tensor(values) for name, values in json.loads(file.read_text())["values"].items()}


def test_we_read_ai_toolkits_dora(tmp_path: Path) -> None:
    found, stem = recorded(), "diffusion_model.blocks.0.self_attn.q"
    names = {"lora_down": "lora_A.weight", "lora_up": "lora_B.weight", "magnitude": "magnitude"}
    file = tmp_path / "dora.safetensors"
    save_file({f"{stem}.{theirs}": found[name] for name, theirs in names.items()}, file)
    opened = open_adapter(file)
    assert opened.detected.algorithms == ("dora",)
    (layer,) = opened.state().layers.values()
    weight = delta.apply(layer, found["weight"])
    output = nn.functional.linear(found["input"], weight, found["bias"])
    torch.testing.assert_close(output, found["output"], atol=1e-5, rtol=1e-5)
    assert (nn.functional.linear(found["input"], found["weight"], found["bias"]) - output).abs().max() > 1e-2


def test_ai_toolkits_dora_of_a_unet_needs_its_alpha(tmp_path: Path) -> None:
    stem = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"
    tensors = {
        f"{stem}.lora_down.weight": torch.ones(2, 8),
        f"{stem}.lora_up.weight": torch.ones(8, 2),
        f"{stem}.magnitude": torch.ones(8),
    }
    file = tmp_path / "dora.safetensors"
    save_file(tensors, file)
    with pytest.raises(BrokenLayerError, match="no other information about the scale of this adapter"):
        open_adapter(file, "sdxl").state()
    with pytest.raises(BrokenLayerError, match="another alpha than its rank"):
        open_adapter(file, "sdxl", alpha=1.0).state()
    (layer,) = open_adapter(file, "sdxl", alpha=2.0).state().layers.values()
    assert (layer.algorithm, layer.scale) == ("dora", 1.0)
