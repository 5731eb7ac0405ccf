"""Recognizing Wan folders, and rejecting others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gracetune.config.families import flavours
from gracetune.errors import ConfigError
from gracetune.models.source import ModelSource
from gracetune.models.spec import EncodeOptions
from gracetune.models.wan.spec import SPEC
from unit.models.wan.cases import CPU, TinyModel, source_of

Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize("flavour", [flavour.name for flavour in flavours("wan")])
def test_every_flavour_is_recognized_with_a_reason(tiny_model: TinyModel, flavour: str) -> None:
    facts = SPEC.inspect(source_of(tiny_model, flavour))
    assert (facts.family, facts.flavour) == ("wan", flavour)
    assert "channels" in facts.details["recognised"]
    boundary = {"t2v-14b-2.2": 0.875, "i2v-14b-2.2": 0.9}.get(flavour)
    if boundary is None:
        assert [(e.name, e.component, e.lowest, e.highest) for e in facts.experts] == [("", "transformer", 0.0, 1.0)]
    else:
        high, low = facts.experts
        assert (high.name, high.component, high.lowest, high.highest) == ("high_noise", "transformer", boundary, 1.0)
        assert (low.name, low.component, low.lowest, low.highest) == ("low_noise", "transformer_2", 0.0, boundary)


@pytest.mark.parametrize(("heads", "flavour"), [(12, "t2v-1.3b-2.1"), (40, "t2v-14b-2.1")])
def test_published_widths_decide_before_the_shift_does(
    tiny_model: TinyModel, tmp_path: Path, heads: int, flavour: str
) -> None:
    source = changed(
        tiny_model,
        tmp_path,
        "t2v-1.3b-2.1",
        "transformer/config.json",
        {"num_attention_heads": heads, "attention_head_dim": 128},
    )
    facts = SPEC.inspect(source)
    assert facts.flavour == flavour
    assert f"{heads * 128} wide" in facts.details["recognised"]


def changed(tiny_model: TinyModel, tmp_path: Path, flavour: str, file: str, change: Mapping[str, Any]) -> ModelSource:
    folder = Path(shutil.copytree(tiny_model("wan", flavour), tmp_path / "changed"))
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, **change}))
    return ModelSource("changed", folder)


@pytest.mark.parametrize(
    ("flavour", "file", "change", "message"),
    [
        ("t2v-14b-2.2", "model_index.json", {"boundary_ratio": None}, "boundary_ratio\n.*found     None"),
        ("t2v-14b-2.2", "model_index.json", {"transformer_2": [None, None]}, "transformer_2\n.*boundary_ratio 0.875"),
        ("t2v-14b-2.2", "transformer/config.json", {"in_channels": 32}, "in_channels\n.*found     32\n.*16 .* or 36"),
        ("i2v-14b-480p-2.1", "transformer/config.json", {"pos_embed_seq_len": 514}, "pos_embed_seq_len\n.*last frame"),
        ("i2v-14b-480p-2.1", "model_index.json", {"image_encoder": [None, None]}, "image_encoder\n.*image_dim"),
        (
            "i2v-14b-2.2",
            "model_index.json",
            {"boundary_ratio": None, "transformer_2": [None, None]},
            "neither a second",
        ),
        ("i2v-14b-2.2", "transformer/config.json", {"in_channels": 16}, "no room for a first frame"),
        ("t2v-14b-2.2", "model_index.json", {"_class_name": "WanVACEPipeline"}, "WanVACEPipeline\n.*WanPipeline"),
        ("t2v-14b-2.2", "vae/config.json", {"_class_name": "AutoencoderKL"}, "vae's class\n.*AutoencoderKL\n"),
    ],
)
def test_related_models_are_rejected_by_name(
    tiny_model: TinyModel, tmp_path: Path, flavour: str, file: str, change: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SPEC.inspect(changed(tiny_model, tmp_path, flavour, file, change))


@pytest.mark.parametrize(("family", "flavour"), [("sdxl", "base-1.0"), ("stable_audio", "open-1.0")])
def test_folder_of_another_family_is_rejected(tiny_model: TinyModel, family: str, flavour: str) -> None:
    with pytest.raises(ConfigError, match=r"Pipeline\n.*WanPipeline, WanImageToVideoPipeline\n.*model.family"):
        SPEC.inspect(ModelSource(family, tiny_model(family, flavour)))


def test_all_missing_parts_are_named_at_once(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("wan", "i2v-14b-480p-2.1"), tmp_path / "model"))
    for part in ("tokenizer", "vae", "image_processor"):
        shutil.rmtree(folder / part)
    source = ModelSource("model", folder)
    with pytest.raises(ConfigError) as caught:
        SPEC.inspect(source)
    text = str(caught.value)
    assert all(f"no folder {part}" in text for part in ("tokenizer", "vae", "image_processor"))
    with pytest.raises(ConfigError, match="no folder vae"):
        SPEC.load_latent_encoder(source, CPU, EncodeOptions())


def test_meta_build_equals_the_loaded_model_in_names_and_shapes(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model, "i2v-14b-480p-2.1")
    (expert,) = SPEC.inspect(source).experts
    built, loaded = SPEC.build_denoiser(source, expert), SPEC.load_denoiser(source, expert, CPU)
    shapes = {name: tensor.shape for name, tensor in loaded.state_dict().items()}
    assert {name: tensor.shape for name, tensor in built.state_dict().items()} == shapes
    assert all(tensor.is_meta for tensor in built.state_dict().values())
    assert {type(block).__name__ for block in loaded.get_submodule("blocks").children()} == set(SPEC.repeated_blocks)
