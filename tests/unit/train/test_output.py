"""A run's files, read in the way of the programs they are made for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.adapters import delta
from gracetune.adapters.attach import attach
from gracetune.adapters.errors import CannotHoldError
from gracetune.adapters.formats.record import FORMATS
from gracetune.config.run_config import Adapter, Model, RunConfig
from gracetune.models.experts import ExpertHost, choose_parking
from gracetune.models.registry import KEY_MAPS, spec_of
from gracetune.models.source import open_source
from gracetune.models.spec import Expert, PartPlacement
from gracetune.train.output import RunFolder, base_weight, check_format, for_format
from gracetune.train.trained_model import TrainedModel
from unit.adapters.formats import comfyui_reader
from unit.adapters.formats.test_comfyui import in_original_layout

TinyModel = Callable[[str, str], Path]


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_a_runs_own_dora_gives_comfyui_the_weights_that_were_trained(path: Any, tiny_model: TinyModel) -> None:
    spec = spec_of("wan")
    source = open_source(Model(family="wan", path=str(tiny_model("wan", "t2v-14b-2.2"))))
    facts = spec.inspect(source)
    cpu = torch.device("cpu")
    denoiser = spec.load_denoiser(source, facts.experts[1], PartPlacement(cpu, torch.float32))
    before = {name: tensor.clone() for name, tensor in denoiser.state_dict().items()}
    adapter = Adapter(kind="dora", rank=2)
    attached = attach(
        denoiser,
        adapter,
        family="wan",
        expert="low_noise",
        default_targets=spec.default_targets,
        seed=0,
        adapter_path=path,
    )
    with torch.no_grad():
        for number, parameter in enumerate(attached.parameters().values()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    host = ExpertHost.open(choose_parking("cpu", park=False, experts=1, managed=False), cpu)
    host.add("low_noise", denoiser)
    trained_model = TrainedModel(spec, source, facts, host, {"low_noise": attached}, torch.float32, {})

    trained = attached.state()
    with pytest.raises(CannotHoldError):
        FORMATS["comfyui"].write(trained, torch.float32)
    held = for_format(trained_model, "low_noise", "comfyui")
    file, _ = FORMATS["comfyui"].write(held, torch.float32)
    weights = {name: before[f"{name}.weight"] for name in trained.layers}
    assert all(torch.equal(base_weight(denoiser, name), weight) for name, weight in weights.items())
    original = in_original_layout("wan", weights)
    names = {name: found.name for name in weights if (found := KEY_MAPS["wan"].original(name)) is not None}
    loaded = comfyui_reader.load(file, original, comfyui_reader.key_map("wan", original, names))
    ours = {name: delta.apply(trained.layers[name], weight) for name, weight in weights.items()}
    for key, weight in in_original_layout("wan", ours).items():
        torch.testing.assert_close(loaded[key], weight, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(original[key], weight, atol=1e-3)

    assert for_format(trained_model, "low_noise", "diffusers").layers.keys() == trained.layers.keys()
    config = RunConfig.model_validate(
        {
            "name": "n", "output_dir": "o", "model": {"family": "wan"}, "datasets": [{"id": "d", "path": "p"}],
            "training": {"max_steps": 1}, "adapter": adapter, "checkpoints": {"format": "comfyui"},
        }
    )  # fmt: skip
    (note,) = check_format(trained_model, config)
    assert "ComfyUI alone" in note


def test_weights_that_a_run_would_overwrite_are_renamed(tmp_path: Path) -> None:
    folder, trained = RunFolder(tmp_path, "a [b]"), ("high_noise", "low_noise")

    def finished() -> dict[str, str]:
        return {path.name: path.read_text() for path in tmp_path.iterdir()}

    for expert in trained:
        for step in (None, 2, 4):
            folder.adapter(expert, step).write_text(f"{expert} {step}")
    (tmp_path / "a [b]_000000004_other.safetensors").write_text("of someone else")
    assert len(folder.set_aside(trained, after=2)) == 2
    notes = folder.move_finished(trained, 4)
    assert notes[0].endswith("it is now called finished-a [b]_000000004_high_noise.safetensors")
    experts = [
        Expert(expert, component) for expert, component in zip(trained, ("transformer", "transformer_2"), strict=True)
    ]
    assert folder.remove_step(experts, 4) == []
    kept = {
        "a [b]_000000004_other.safetensors": "of someone else",
        **{f"a [b]_000000002_{expert}.safetensors": f"{expert} 2" for expert in trained},
        **{f"set-aside-a [b]_000000004_{expert}.safetensors": f"{expert} 4" for expert in trained},
        **{f"finished-a [b]_000000004_{expert}.safetensors": f"{expert} None" for expert in trained},
    }
    assert finished() == kept
    folder.adapter("high_noise").write_text("again")
    folder.move_finished(trained, 4)
    assert finished() == {**kept, "finished-2-a [b]_000000004_high_noise.safetensors": "again"}
