"""The default targets are exactly the layers that get a gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gracetune.adapters.attach import attach
from gracetune.config.run_config import Adapter
from gracetune.models.registry import spec_of
from gracetune.models.source import ModelSource
from gracetune.models.spec import PartPlacement
from unit.models.model_inputs import as_tensor, inputs_of

CPU = PartPlacement(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("family", "flavour", "idle"),
    [
        ("qwen_image", "t2i", 4),
        ("flux", "dev", 0),
        ("flux2", "dev", 0),
        ("z_image", "base", 0),
        ("krea2", "raw", 0),
        ("sdxl", "base-1.0", 0),
        ("stable_audio", "open-1.0", 0),
        ("wan", "i2v-14b-480p-2.1", 0),
    ],
)
def test_default_targets_are_exactly_the_trainable_layers(
    family: str, flavour: str, idle: int, tiny_model: Callable[[str, str], Path]
) -> None:
    spec, source = spec_of(family), ModelSource(flavour, tiny_model(family, flavour))
    facts = spec.inspect(source)
    untrained = (*spec.untrained, *facts.untrained)
    learned = {}
    for left_out in (untrained, ()):
        denoiser = spec.load_denoiser(source, facts.experts[0], CPU)
        attached = attach(
            denoiser, Adapter(rank=2), family=family, default_targets=spec.default_targets, untrained=left_out, seed=0
        )
        inputs = inputs_of(denoiser, torch.float32)
        assert isinstance(inputs, dict)
        as_tensor(denoiser(**inputs, return_dict=False)[0]).square().sum().backward()
        ups = {name: one for name, one in attached.parameters().items() if one.grad is not None and one.grad.any()}
        assert attached.selection is not None
        learned[left_out] = {name.rpartition(".")[0].removesuffix(".lora_B") for name in ups}, attached.selection
    found, selection = learned[untrained]
    reached, everything = learned[()]
    assert {path for path in selection.paths if not any(name.startswith(path) for name in found)} == set()
    assert len(everything.paths) - len(selection.paths) == idle
    assert found == reached
