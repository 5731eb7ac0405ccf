from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gracetune.errors import ConfigError
from gracetune.models.source import ModelSource
from gracetune.models.stable_audio.spec import SPEC
from unit.models.stable_audio.cases import CPU, TinyModel, source_of


def test_facts(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model)
    facts = SPEC.inspect(source)
    assert (facts.family, facts.flavour, facts.shift) == ("stable_audio", "open-1.0", 1.0)
    assert [(expert.name, expert.component) for expert in facts.experts] == [("", "transformer")]
    assert facts.schedule.prediction == "v_prediction"
    assert (facts.details["text_tokens"], facts.details["rotary_size"]) == (128, 8)
    channels = json.loads((source.folder / "transformer" / "config.json").read_text())["in_channels"]
    assert f"{channels} latent channels" in facts.details["recognised"]


def test_published_scheduler_is_supported(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Its class cannot be imported without torchsde; we read only its configuration."""
    source = changed(
        tiny_model, tmp_path, "scheduler/scheduler_config.json", {"_class_name": "CosineDPMSolverMultistepScheduler"}
    )
    index = json.loads((source.folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "CosineDPMSolverMultistepScheduler"]
    (source.folder / "model_index.json").write_text(json.dumps(index))
    assert SPEC.inspect(source).flavour == "open-1.0"
    assert SPEC.load_pipeline(source, {}, CPU).scheduler.config.sigma_max == 500


def changed(tiny_model: TinyModel, tmp_path: Path, file: str, change: Mapping[str, Any]) -> ModelSource:
    folder = Path(shutil.copytree(source_of(tiny_model).folder, tmp_path / "changed"))
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, **change}))
    return ModelSource("changed", folder)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("scheduler/scheduler_config.json", {"prediction_type": "epsilon"}, "prediction_type\n.*'epsilon'\n.*'v_pred"),
        ("scheduler/scheduler_config.json", {"sigma_data": 0.5}, "sigma_data\n.*0.5\n.*1.0"),
        ("tokenizer/tokenizer_config.json", {"model_max_length": 1e30}, "model_max_length\n.*1e\\+30"),
        ("transformer/config.json", {"in_channels": 33}, "in_channels\n.*33\n.*, as in the VAE's"),
        ("transformer/config.json", {"_class_name": "FluxTransformer2DModel"}, "class\n.*FluxTransformer2DModel\n"),
        ("model_index.json", {"_class_name": "AudioLDM2Pipeline"}, "AudioLDM2Pipeline\n.*StableAudioPipeline\n"),
    ],
)
def test_related_models_are_rejected_by_name(
    tiny_model: TinyModel, tmp_path: Path, file: str, change: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SPEC.inspect(changed(tiny_model, tmp_path, file, change))


def test_folder_of_another_family_is_rejected(tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match=r"WanPipeline\n.*StableAudioPipeline\n.*model.family"):
        SPEC.inspect(ModelSource("wan", tiny_model("wan", "t2v-14b-2.2")))


def test_all_missing_parts_are_named_at_once(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(source_of(tiny_model).folder, tmp_path / "model"))
    for part in ("projection_model", "vae"):
        shutil.rmtree(folder / part)
    with pytest.raises(ConfigError) as caught:
        SPEC.inspect(ModelSource("model", folder))
    assert all(f"no folder {part}" in str(caught.value) for part in ("projection_model", "vae"))


def test_meta_build_equals_the_loaded_model_in_names_and_shapes(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model)
    (expert,) = SPEC.inspect(source).experts
    built, loaded = SPEC.build_denoiser(source, expert), SPEC.load_denoiser(source, expert, CPU)
    shapes = {name: tensor.shape for name, tensor in loaded.state_dict().items()}
    assert {name: tensor.shape for name, tensor in built.state_dict().items()} == shapes
    blocks = loaded.get_submodule("transformer_blocks").children()
    assert {type(block).__name__ for block in blocks} == set(SPEC.repeated_blocks)
