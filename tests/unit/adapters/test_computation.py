"""The form of computation is the cheapest one, by multiplications and by the memory it keeps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lycoris.modules.lokr import LokrModule
from torch import nn

from gracetune.adapters.algorithms.lokr import KEPT_SHARE, Kronecker, cheapest, kronecker, lycoris_can_load
from gracetune.adapters.algorithms.registry import algorithm


@dataclass(frozen=True)
class Options:
    rank: int = 16
    factor: int = -1
    full_rank: bool = False
    decompose_both: bool = False
    dropout: float = 0.0


SIZE = st.integers(1, 200)


@given(SIZE, SIZE, SIZE, SIZE, st.integers(1, 64), st.booleans())
@settings(deadline=None)
def test_lokr_takes_the_cheaper_order(a: int, b: int, c: int, d: int, rank: int, apart: bool) -> None:
    found = cheapest(Kronecker((a, c), (b, d), rank, False, apart))
    whole = {True: a * c * d + a * b * d, False: c * b * d + a * c * b}
    if found.form == "kronecker":
        assert whole[found.w1_first] == min(whole.values())
        assert found.kept == 0
    else:
        assert apart
        assert rank * (c * d + a * c + a * b) < min(whole.values())
        assert KEPT_SHARE * found.kept <= c * d


@given(SIZE, SIZE, st.integers(1, 20))
@settings(deadline=None)
def test_loha_is_rebuilt_only_where_pairs_cost_more(inputs: int, outputs: int, rank: int) -> None:
    found = algorithm("loha").computation(inputs, outputs, Options(rank))
    pairs = rank**2 * (inputs + outputs) <= inputs * outputs
    assert found.path == ("factorised" if pairs else "rebuilt")
    assert found.kept == (rank**2 if pairs else 0)


@pytest.mark.parametrize(
    ("kind", "options", "form", "kept"),
    [
        ("lora", Options(), "low rank", 16),
        ("locon", Options(), "low rank", 16),
        ("dora", Options(), "low rank", 16 + 13824),
        ("dora", Options(dropout=0.1), "reference", 16 + 2 * 13824),
        ("lokr", Options(factor=16, full_rank=True), "kronecker", 0),
        ("lokr", Options(factor=16), "kronecker by rank", 16 * 32),
        ("lokr", Options(), "kronecker", 0),  # 64 x 108: the rank's tensors would be half of the input's size
        ("loha", Options(), "hadamard by rank", 256),
        ("loha", Options(rank=64), "hadamard rebuilt", 0),
        ("ia3", Options(), "reference", 0),
        ("full_delta", Options(), "reference", 0),
    ],
)
def test_on_the_feed_forward_of_wan_14b(kind: str, options: Options, form: str, kept: int) -> None:
    found = algorithm(kind).computation(5120, 13824, options)
    assert (found.form, found.kept) == (form, kept)
    assert found.why


@pytest.mark.parametrize(("inputs", "outputs"), [(320, 320), (320, 640), (640, 640), (640, 1280), (1280, 1280)])
@pytest.mark.parametrize("rank", [1, 4, 16, 64])
@pytest.mark.parametrize("kernel", [1, 3])
def test_lycoris_loads_what_it_split_itself(inputs: int, outputs: int, rank: int, kernel: int) -> None:
    layer = nn.Conv2d(inputs, outputs, kernel)
    module = LokrModule("", layer, 1.0, rank, rank)
    tensors = {name: parameter.detach() for name, parameter in module.named_parameters()}
    given = [tensors.get(name) for name in LokrModule.weight_list[:8]]
    with torch.no_grad():
        LokrModule.make_module_from_state_dict("", layer, *given, torch.tensor(float(rank)), None)  # does not raise
    assert lycoris_can_load(tensors, rank)


@given(st.sampled_from([8, 24, 30, 64, 96]), st.sampled_from([6, 16, 60]), st.integers(1, 20), st.booleans(),
       st.booleans(), st.sampled_from([-1, 2, 4, 7]))  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_factors_are_split_as_lycoris_does(
    inputs: int, outputs: int, rank: int, full: bool, both: bool, factor: int
) -> None:
    split = kronecker(inputs, outputs, Options(rank, factor, full, both))
    module = LokrModule("", nn.Linear(inputs, outputs, device="meta"), 1.0, rank, rank, factor=factor,
                        decompose_both=both, full_matrix=full)  # fmt: skip
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert split.first_apart == ("lokr_w1_a" in shapes)
    assert split.second_apart == ("lokr_w2_a" in shapes)
    for name, (rows, columns), apart in (
        ("lokr_w1", split.first, split.first_apart),
        ("lokr_w2", split.second, split.second_apart),
    ):
        found = (shapes[f"{name}_a"][0], shapes[f"{name}_b"][1]) if apart else shapes[name]
        assert found == (rows, columns)
