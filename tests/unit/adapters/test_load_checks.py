from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gracetune.adapters.attach import Attached, attach
from gracetune.adapters.state import AdapterState, Layer
from gracetune.config.run_config import Adapter
from gracetune.errors import ConfigError


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.ModuleDict({"one": nn.Linear(6, 8), "two": nn.Conv2d(6, 8, 3), "three": nn.Linear(8, 8)})


def attached(kind: str = "lora", targets: tuple[str, ...] = ("one", "two", "three"), **options: Any) -> Attached:
    adapter = Adapter(kind=kind, targets=targets, **{"rank": 2, **options})  # type: ignore[arg-type]
    return attach(model(), adapter, family="wan", expert="high_noise", default_targets=(), seed=0)


def shaken(made: Attached) -> AdapterState:
    with torch.no_grad():
        for parameter in made.parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return made.state()


def changed(
    state: AdapterState, path: str, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
) -> AdapterState:
    layer = state.layers[path]
    return replace(state, layers={**state.layers, path: replace(layer, tensors=change(dict(layer.tensors)))})


def rejection(target: Attached, state: AdapterState) -> str:
    before = target.state()
    with pytest.raises(ConfigError) as caught:
        target.load(state)
    for path, layer in target.state().layers.items():  # all or nothing
        assert all(torch.equal(tensor, before.layers[path].tensors[name]) for name, tensor in layer.tensors.items())
    return str(caught.value)


class TestRejections:
    def test_missing_and_unexpected_layers_together(self) -> None:
        state = shaken(attached(targets=("one", "two")))
        message = rejection(attached(targets=("two", "three")), state)
        assert "three\n  found     missing" in message
        assert "one\n  found     unexpected" in message

    def test_a_thousand_of_a_kind_are_counted(self) -> None:
        state = shaken(attached(targets=("one",)))
        many = {f"no.such.{index}": state.layers["one"] for index in range(1000)}
        message = rejection(attached(targets=("one",)), replace(state, layers={**state.layers, **many}))
        assert "992 more of this kind" in message
        assert message.count("found") == 9

    def test_another_rank(self) -> None:
        message = rejection(attached(), shaken(attached(rank=3)))
        assert "one.lora_A.weight" in message
        assert "shape [3, 6]" in message
        assert "shape [2, 6]" in message

    def test_another_algorithm(self) -> None:
        message = rejection(attached(), shaken(attached("lokr")))
        assert "--set adapter.kind=lokr" in message

    def test_a_tensor_too_few_and_one_too_many(self) -> None:
        state = changed(shaken(attached("locon")), "two", lambda tensors: {**tensors, "lora_mid.weight": torch.ones(2)})
        state = changed(state, "one", lambda tensors: {"lora_up.weight": tensors["lora_up.weight"]})
        message = rejection(attached("locon"), state)
        assert "two.lora_mid.weight" in message
        assert "one.lora_down.weight\n  found     missing" in message

    def test_nan(self) -> None:
        state = changed(
            shaken(attached()), "one", lambda tensors: {**tensors, "lora_B.weight": torch.full((8, 2), torch.nan)}
        )
        assert "NaN or infinite values" in rejection(attached(), state)

    def test_family_and_stage(self) -> None:
        state = shaken(attached())
        assert "made for flux" in rejection(attached(), replace(state, family="flux"))
        assert "low_noise expert" in rejection(attached(), replace(state, expert="low_noise"))
        attached().load(replace(state, expert=""))  # one file for both experts

    def test_ia3_on_the_input(self) -> None:
        state = changed(shaken(attached("ia3")), "three", lambda tensors: {**tensors, "on_input": torch.tensor(1)})
        assert "three.on_input\n  found     1\n  expected  0" in rejection(attached("ia3"), state)


def same_effect(one: Attached, other: AdapterState) -> None:
    from gracetune.adapters.delta import apply

    for path, layer in one.state().layers.items():
        weight = torch.randn(8, 8) if path == "three" else torch.randn((8, 6, 3, 3) if path == "two" else (8, 6))
        torch.testing.assert_close(apply(layer, weight), apply(other.layers[path], weight), rtol=1e-5, atol=1e-5)


class TestEffect:
    @pytest.mark.parametrize("kind", ["lora", "dora", "locon", "loha", "lokr"])
    def test_another_alpha_has_the_files_effect_and_the_configs_alpha(self, kind: str) -> None:
        options = {"factor": 2, "rank": 1} if kind == "lokr" else {}
        state = shaken(attached(kind, alpha=3.0, **options))
        target = attached(kind, alpha=1.0, **options)
        target.load(state)
        assert {layer.alpha for layer in target.state().layers.values() if layer.rank} == {1.0}
        same_effect(target, state)

    @pytest.mark.parametrize(("source", "target"), [("locon", "lora"), ("lora", "locon")])
    def test_lora_and_locon_are_one(self, source: str, target: str) -> None:
        state = shaken(attached(source))
        loaded = attached(target)
        loaded.load(state)
        same_effect(loaded, state)

    def test_a_dora_from_a_locon_file(self) -> None:
        state = shaken(attached("dora"))
        names = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight"}
        layers = {}
        for path, layer in state.layers.items():
            tensors = {names.get(name, name): tensor for name, tensor in layer.tensors.items()}
            tensors["dora_scale"] = tensors["dora_scale"].reshape(8, *(1,) * (3 if path == "two" else 1))
            layers[path] = Layer("locon", tensors, layer.alpha, layer.rank)
        loaded = attached("dora")
        loaded.load(replace(state, layers=layers))
        same_effect(loaded, state)

    def test_a_half_precision_file(self) -> None:
        state = shaken(attached())
        halved = {
            path: replace(layer, tensors={name: tensor.bfloat16() for name, tensor in layer.tensors.items()})
            for path, layer in state.layers.items()
        }
        loaded = attached()
        loaded.load(replace(state, layers=halved))
        assert all(parameter.dtype == torch.float32 for parameter in loaded.parameters().values())
