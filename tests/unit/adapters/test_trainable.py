"""Trainable tensors and optimizer state, against the libraries that make them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lycoris.functional.general import factorization as lycoris_factorization
from lycoris.modules.diag_oft import DiagOFTModule
from lycoris.modules.full import FullModule
from lycoris.modules.ia3 import IA3Module
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from gracetune.adapters.algorithms.matrices import factorization
from gracetune.adapters.trainable import (
    TargetLayers,
    Tensors,
    select,
    trainable,
)
from gracetune.config.run_config import Adapter, Optimizer
from gracetune.models.footprint import FootprintBlock, FootprintKept, FootprintLinear
from gracetune.models.registry import FOOTPRINTS
from gracetune.optim.record import optimizer_state

WAN = FOOTPRINTS["wan"][0]


def shapes(inputs: int, outputs: int, adapter: Adapter) -> list[tuple[int, ...]]:
    linear = FootprintLinear("layer", inputs, outputs, "x")
    block = FootprintBlock("blocks.*", 1, (), (), (), (linear,), Fraction(1))
    return sorted(tensor.shape for tensor in TargetLayers(block, linear, adapter, 1).tensors())


def made_by(module: nn.Module) -> list[tuple[int, ...]]:
    return sorted(tuple(parameter.shape) for parameter in module.parameters())


LYCORIS: dict[str, type[nn.Module]] = {
    "locon": LoConModule,
    "loha": LohaModule,
    "lokr": LokrModule,
    "ia3": IA3Module,
    "diag_oft": DiagOFTModule,
    "full_delta": FullModule,
}


class TestShapes:
    @pytest.mark.parametrize("kind", LYCORIS)
    @pytest.mark.parametrize("rank", [4, 16])
    def test_lycoris(self, kind: Any, rank: int) -> None:
        module = LYCORIS[kind]("x", nn.Linear(96, 160), 1.0, rank, rank)
        assert shapes(96, 160, Adapter(kind=kind, rank=rank)) == made_by(module)

    @pytest.mark.parametrize("options", [{}, {"factor": 8}, {"factor": 7}, {"factor": 4, "decompose_both": True}])
    @pytest.mark.parametrize("rank", [1, 3, 64])
    @pytest.mark.parametrize("full", [False, True])
    def test_every_form_of_lokr(self, options: dict[str, Any], rank: int, full: bool) -> None:
        module = LokrModule("x", nn.Linear(320, 1280), 1.0, rank, rank, full_matrix=full, **options)
        assert shapes(320, 1280, Adapter(kind="lokr", rank=rank, full_rank=full, **options)) == made_by(module)

    @pytest.mark.parametrize("dora", [False, True])
    def test_peft(self, dora: bool) -> None:
        model = nn.Sequential(nn.Linear(96, 160))
        inject_adapter_in_model(LoraConfig(r=8, target_modules=["0"], use_dora=dora), model)
        made = sorted(tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad)
        assert shapes(96, 160, Adapter(kind="dora" if dora else "lora", rank=8)) == made

    @given(st.integers(1, 20_000), st.integers(-1, 200).filter(bool))
    @settings(deadline=None)
    def test_factorization_is_lycoris_own(self, dimension: int, factor: int) -> None:
        assert factorization(dimension, factor) == lycoris_factorization(dimension, factor)


class TestTargets:
    def test_wan_has_400_matrices_and_a_lora_of_77_million(self) -> None:
        selection = select(WAN, Adapter(kind="lora", rank=16))
        assert sum(target.count for target in selection.targets) == 400
        total = sum(tensor.elements for tensor in trainable(WAN, selection, Adapter(rank=16)))
        assert total == 40 * (8 * 16 * (5120 + 5120) + 2 * 16 * (5120 + 13_824)) == 76_677_120

    @pytest.mark.parametrize(
        ("pattern", "count"),
        [("Attention", 320), ("FeedForward", 80), ("to_q", 80), ("to_out.0", 80), ("attn1", 160), ("blocks", 400),
         ("blocks.*.ffn", 80), ("ffn.net.2", 40), ("net", 80), ("to", 0), ("blocks.*.attn?.to_k", 80),
         ("blocks.7", 10), ("blocks.3*.ffn", 22), ("blocks.40", 0)],
    )  # fmt: skip
    def test_patterns(self, pattern: str, count: int) -> None:
        selection = select(WAN, Adapter(targets=(pattern,)))
        assert sum(target.count for target in selection.targets) == count
        assert selection.unmatched == (() if count else (pattern,))

    def test_exclusion_and_options_by_module(self) -> None:
        adapter = Adapter(
            kind="lokr", factor=16, full_rank=True, exclude=("attn2",), by_module={"FeedForward": {"factor": 8}}
        )
        selection = select(WAN, adapter)
        assert sum(target.count for target in selection.targets) == 240
        factors = {target.linear.name.partition(".")[0]: target.adapter.factor for target in selection.targets}
        assert factors == {"attn1": 16, "ffn": 8}

    def test_another_algorithm_by_module(self) -> None:
        adapter = Adapter(kind="lokr", by_module={"FeedForward": {"algo": "loha", "dim": 4}})
        kinds = {
            target.linear.name.partition(".")[0]: (target.adapter.kind, target.adapter.rank)
            for target in select(WAN, adapter).targets
        }
        assert kinds == {"attn1": ("lokr", 16), "attn2": ("lokr", 16), "ffn": ("loha", 4)}

    def test_a_full_finetune_trains_every_parameter(self) -> None:
        for family in FOOTPRINTS.values():
            adapter = Adapter(kind="full_finetune")
            tensors = trainable(family[0], select(family[0], adapter), adapter)
            assert sum(tensor.elements for tensor in tensors) == family[0].parameters

    def test_a_full_finetune_of_a_part(self) -> None:
        def counted(**options: Any) -> int:
            adapter = Adapter(kind="full_finetune", **options)
            return sum(tensor.elements for tensor in trainable(WAN, select(WAN, adapter), adapter))

        part = counted(targets=("attn1",))
        assert part == 40 * 4 * (5120 * 5120 + 5120)
        assert counted(exclude=("attn1",)) == WAN.parameters - part
        assert counted(targets=("attn1", "attn2"), exclude=("attn2",)) == part

    def test_a_part_of_a_name_is_not_a_name(self) -> None:
        linear = FootprintLinear("attn1.to_q", 8, 8, "x", "Attention")
        block = FootprintBlock("blocks.*", 1, (), (FootprintKept("residual", 8),), (), (linear,))
        footprint = replace(WAN, blocks=(block,))
        for pattern, count in (("to_q", 1), ("o_q", 0), ("attn1.to_q.more", 0)):
            assert len(select(footprint, Adapter(targets=(pattern,))).targets) == count


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name != "step"
    )


def stepped(kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((96, 16), (16, 160), (160,), (3, 8, 8))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = kind(parameters, lr=1e-3, **options)
    optimizer.step()
    return optimizer


TENSORS = tuple(Tensors(shape, 1) for shape in ((96, 16), (16, 160), (160,), (3, 8, 8)))
ELEMENTS = sum(tensor.elements for tensor in TENSORS)


class TestOptimizerState:
    def test_adamw(self) -> None:
        assert optimizer_state(TENSORS, Optimizer(name="adamw")).bytes == state_bytes(stepped(torch.optim.AdamW))

    def test_adafactor(self) -> None:
        expected = state_bytes(stepped(torch.optim.Adafactor))
        assert optimizer_state(TENSORS, Optimizer(name="adafactor")).bytes == expected

    def test_adafactor_with_momentum(self) -> None:
        plain, options = optimizer_state(TENSORS, Optimizer(name="adafactor")), {"beta1": 0.9}
        with_momentum = optimizer_state(TENSORS, Optimizer(name="adafactor", options=options))
        assert with_momentum.bytes - plain.bytes == 4 * ELEMENTS

    def test_lion_and_prodigy(self) -> None:
        assert optimizer_state(TENSORS, Optimizer(name="lion")).bytes == 4 * ELEMENTS
        assert optimizer_state(TENSORS, Optimizer(name="prodigy")).bytes == 16 * ELEMENTS
        sliced = optimizer_state(TENSORS, Optimizer(name="prodigy", options={"slice_p": 11})).bytes
        assert 8 * ELEMENTS < sliced < 9 * ELEMENTS

    def test_8bit_adam_keeps_small_tensors_whole(self) -> None:
        small, large = (Tensors((4000,), 3),), (Tensors((64, 64), 2),)
        optimizer = Optimizer(name="adamw_8bit")
        assert optimizer_state(small, optimizer).bytes == 8 * 12_000
        assert optimizer_state(large, optimizer).bytes == 2 * (2 * 4096 + 2 * 16 * 4)

    def test_automagic_is_a_quarter_of_adam(self) -> None:
        tensors = trainable(WAN, select(WAN, Adapter(rank=16)), Adapter(rank=16))
        automagic = optimizer_state(tensors, Optimizer(name="automagic")).bytes
        elements = sum(tensor.elements for tensor in tensors)
        rows = sum(4 * sum(tensor.shape) * tensor.count for tensor in tensors)
        assert automagic == 3 * elements + rows

    @given(
        st.sampled_from(["adamw", "adafactor", "lion", "prodigy", "prodigy_plus_schedule_free", "automagic"]),
        st.integers(1, 64),
        st.integers(1, 64),
    )
    @settings(deadline=None)
    def test_more_parameters_never_need_less(self, name: Any, rows: int, columns: int) -> None:
        optimizer = Optimizer(name=name)
        less = optimizer_state((Tensors((rows, columns), 1),), optimizer).bytes
        assert optimizer_state((Tensors((rows, columns), 2),), optimizer).bytes >= less
        assert optimizer_state((Tensors((rows + 1, columns), 1),), optimizer).bytes >= less
