"""An adapter that is written, read and written again gives the same bytes. A format rejects what it cannot hold."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gracetune.adapters import delta
from gracetune.adapters.adapter_files import open_adapter, save
from gracetune.adapters.errors import CannotHoldError
from gracetune.adapters.formats.record import FORMATS
from gracetune.adapters.state import AdapterState, ExpertStage
from unit.adapters.formats import making

OPTIONS = ("tucker", "decomposed", "both", "dora", "rescale", "bias", "on_input")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def effect(state: AdapterState, shapes: making.Shapes) -> dict[str, torch.Tensor]:
    """Each layer applied to a weight that is the same for both."""
    found = {}
    for path, layer in state.layers.items():
        weight = torch.linspace(-1, 1, torch.Size(shapes[path]).numel()).reshape(shapes[path])
        found[path] = delta.apply(layer, weight)
        bias = delta.bias_delta(layer)
        if bias is not None:
            found[f"{path} bias"] = bias
    return found


def assert_same_effect(one: AdapterState, other: AdapterState, shapes: making.Shapes, tolerance: float) -> None:
    ones, others = effect(one, shapes), effect(other, shapes)
    assert ones.keys() == others.keys()
    for path, expected in ones.items():
        close = torch.isclose(others[path], expected, atol=tolerance, rtol=tolerance)
        assert close.all(), f"{path}: {(others[path] - expected).abs().max()}"


def any_adapter(examples: int):
    """Random layers, kind, rank, alpha, options and precision, for every family and format."""

    def decorated(test):
        test = given(data=st.data())(test)
        test = settings(max_examples=examples, suppress_health_check=[HealthCheck.function_scoped_fixture])(test)
        return pytest.mark.parametrize("format", FORMATS)(pytest.mark.parametrize("family", making.FLAVOURS)(test))

    return decorated


@any_adapter(10)
def test_any_adapter_round_trips_or_is_rejected(family, format, data, tiny_model, tmp_path_factory) -> None:
    round_trip(family, format, data, tiny_model, tmp_path_factory)


@pytest.mark.full
@any_adapter(200)
def test_many_adapters_round_trip_or_are_rejected(family, format, data, tiny_model, tmp_path_factory) -> None:
    round_trip(family, format, data, tiny_model, tmp_path_factory)


def round_trip(family, format, data, tiny_model, tmp_path_factory) -> None:
    shapes = making.layer_shapes(family, tiny_model)
    paths = data.draw(st.lists(st.sampled_from(sorted(shapes)), min_size=1, max_size=6, unique=True), label="layers")
    algorithm = data.draw(st.sampled_from(making.ALGORITHMS), label="algorithm")
    options = data.draw(st.sets(st.sampled_from(OPTIONS), max_size=2), label="options")
    alpha = data.draw(st.sampled_from([0.5, 1.0, 2.0, 3.0, 16.0, 0.1, 1e4]), label="alpha")
    rank = data.draw(st.integers(1, 4), label="rank")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    expert: ExpertStage = (
        data.draw(st.sampled_from(["", "high_noise", "low_noise"]), label="stage") if family == "wan" else ""
    )
    chosen = {path: shapes[path] for path in paths}
    adapter = making.state(family, chosen, algorithm, rank=rank, alpha=alpha, expert=expert, options=options)
    folder = tmp_path_factory.mktemp("round-trip")
    try:
        first = save(folder / "first.safetensors", adapter, format, dtype)
    except CannotHoldError as error:
        assert "layers" in str(error) or ":" in error.problems[0].found
        assert format != "lycoris", "the format that holds everything"
        return
    opened = open_adapter(first, family)
    again = opened.state()
    assert again.expert == expert
    assert opened.detected.format == format
    second = save(folder / "second.safetensors", again, format, dtype)
    assert first.read_bytes() == second.read_bytes()
    if dtype is torch.float32:
        assert_same_effect(adapter, again, shapes, 1e-5)
    assert list(again.layers) == list(adapter.layers)


@pytest.mark.parametrize("format", ["comfyui", "kohya", "lycoris"])
def test_both_experts_of_a_lokr_round_trip(format, tiny_model, tmp_path: Path) -> None:
    """The case the forks lose: full-rank LoKr of two experts, in half precision, by way of their two files."""
    shapes = making.in_blocks(making.layer_shapes("wan", tiny_model))
    for seed, expert in enumerate(("high_noise", "low_noise")):
        adapter = making.state("wan", shapes, "lokr", seed=seed, expert=expert)
        first = save(tmp_path / f"first_{expert}.safetensors", adapter, format, torch.float16)
        again = open_adapter(first).state()
        assert (again.family, again.expert) == ("wan", expert)
        assert {layer.alpha for layer in again.layers.values()} == {1.0}
        second = save(tmp_path / f"second_{expert}.safetensors", again, format, torch.float16)
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(("source", "target"), [*itertools.permutations(FORMATS, 2)])
@pytest.mark.parametrize("family", making.FLAVOURS)
def test_a_lora_goes_through_every_pair_of_formats(family, source, target, tiny_model, tmp_path: Path) -> None:
    """Converting to another format and back gives the same bytes."""
    shapes = making.one_of_each(making.in_blocks(making.layer_shapes(family, tiny_model)))
    adapter = making.state(family, shapes, "lora", rank=2, alpha=1.0)
    first = save(tmp_path / "first.safetensors", adapter, source, torch.bfloat16)
    existing = save(tmp_path / "there.safetensors", open_adapter(first, family).state(), target, torch.bfloat16)
    back = save(tmp_path / "back.safetensors", open_adapter(existing, family).state(), source, torch.bfloat16)
    assert first.read_bytes() == back.read_bytes()


@pytest.mark.parametrize("format", ["comfyui", "kohya"])
@pytest.mark.parametrize("family", ["flux", "stable_audio"])
def test_a_difference_before_its_first_step(family, format, tiny_model, tmp_path: Path) -> None:
    """All zeros in a fused matrix are still an adapter of its layers."""
    shapes = making.in_blocks(making.layer_shapes(family, tiny_model))
    state = making.state(family, shapes, "full_delta")
    layers = {path: replace(one, tensors={"diff": torch.zeros(shapes[path])}) for path, one in state.layers.items()}
    first = save(tmp_path / "a.safetensors", replace(state, layers=layers), format, torch.float32)
    again = open_adapter(first, family).state()
    assert list(again.layers) == list(layers)
    assert save(tmp_path / "b.safetensors", again, format, torch.float32).read_bytes() == first.read_bytes()
