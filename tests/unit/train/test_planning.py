from __future__ import annotations

from typing import Any

import pytest
import torch

from gracetune.models.attention import AttentionFacts, _calls_torch_directly, choose_attention
from gracetune.models.registry import spec_of
from gracetune.models.source import ModelSource
from gracetune.models.spec import PartPlacement
from gracetune.planning.plan import plan
from gracetune.planning.processes import Processes
from gracetune.train.planning import PlannedRun, choose_base
from runs.made_runs import FLAVOURS, TinyModel
from unit.models.model_inputs import answer
from unit.planning.test_plan import config_of, demand, small_gpu


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of torch's attention, whether it had a mask."""
    seen: list[bool] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(kwargs.get("attn_mask") is not None)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    return seen


@pytest.mark.parametrize("family", FLAVOURS)
def test_the_attention_facts_of_a_family_match_its_denoiser(
    family: str, tiny_model: TinyModel, masks: list[bool]
) -> None:
    spec = spec_of(family)
    source = ModelSource("tiny", tiny_model(family, FLAVOURS[family]))
    expert = spec.inspect(source).experts[0]
    denoiser = spec.load_denoiser(source, expert, PartPlacement(torch.device("cpu"), torch.float32))
    answer(denoiser, torch.float32)
    assert any(masks) == spec.attention.masked
    assert any(_calls_torch_directly(module) for module in denoiser.modules()) == (not spec.attention.dispatched)
    hopper = AttentionFacts(
        "cuda", torch.bfloat16, (9, 0), masked=spec.attention.masked, dispatched=spec.attention.dispatched
    )
    assert choose_attention("auto", hopper).backend == (None if spec.attention.masked else "_native_cudnn")


AUTO: dict[str, Any] = {"training": {"gradient_checkpointing": "full"}, "model": {"base_precision": "auto"}}


class TestAuto:
    """The choice made by `model.base_precision: auto`."""

    @pytest.mark.parametrize(("gigabytes", "held"), [(48, "bf16"), (26, "int8")])
    def test_the_plan_decides(self, gigabytes: int, held: str) -> None:
        needed = demand(**AUTO)
        found, why = choose_base(config_of(**AUTO), PlannedRun(needed, plan(needed, small_gpu(gigabytes))))
        assert found == held
        assert why is not None
        assert "usable in GPU memory" in why
        assert ("bf16 does not fit" in why) == (held == "int8")

    def test_in_a_run_that_computes_in_fp16(self) -> None:
        training = {**AUTO["training"], "mixed_precision": "fp16"}
        needed = demand(model=AUTO["model"], training=training)
        config = config_of(model=AUTO["model"], training=training)
        assert choose_base(config, PlannedRun(needed, plan(needed, small_gpu(48))))[0] == "fp16"

    @pytest.mark.parametrize(("parameters", "held"), [(10 * 10**9, "bf16"), (20 * 10**9, "int8")])
    def test_weights_without_a_plan_are_compared_with_the_memory(self, parameters: int, held: str) -> None:
        needed = demand(**AUTO)
        planned = PlannedRun(needed, plan(needed, small_gpu(48)), mismatch="others", parameters=parameters)
        found, why = choose_base(config_of(**AUTO), planned)
        assert found == held
        assert why is not None
        assert "without a plan for these weights" in why

    def test_an_unknown_amount_of_memory_means_int8(self) -> None:
        needed = demand(**AUTO)
        machine = small_gpu(48)
        unknown = machine.gpus[0].model_copy(update={"memory_total": None, "memory_free": None})
        found = plan(needed, machine.model_copy(update={"gpus": (unknown,)}))
        assert found.verdict == "unknown"
        assert choose_base(config_of(**AUTO), PlannedRun(needed, found))[0] == "int8"
        assert choose_base(config_of(**AUTO), PlannedRun(needed, found, mismatch="others"))[0] == "int8"

    def test_sharded_weights_stay_in_16_bits(self) -> None:
        needed = demand(**AUTO, processes=Processes(2, 2, sharded=True))
        for others in (None, "others"):
            planned = PlannedRun(needed, plan(needed, small_gpu(12)), mismatch=others, parameters=10**12)
            found, why = choose_base(config_of(**AUTO), planned)
            assert found == "bf16"
            assert "FSDP" in str(why)

    def test_a_precision_set_in_the_config_has_no_reason(self) -> None:
        needed = demand(model={"base_precision": "int8"})
        config = config_of(model={"base_precision": "int8"})
        assert choose_base(config, PlannedRun(needed, plan(needed, small_gpu(48)))) == ("int8", None)
