from __future__ import annotations

from typing import Any

import pytest
import torch

from gracetune.models.attention import AttentionFacts, _calls_torch_itself, choose_attention
from gracetune.models.registry import spec_of
from gracetune.models.source import ModelSource
from gracetune.models.spec import Placement
from runs.made import FLAVOURS, TinyModel
from unit.models.model_inputs import answer


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of torch's attention was given a mask."""
    seen: list[bool] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(kwargs.get("attn_mask") is not None)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    return seen


@pytest.mark.parametrize("family", FLAVOURS)
def test_what_a_family_says_about_its_attention_is_what_its_denoiser_does(
    family: str, tiny_model: TinyModel, masks: list[bool]
) -> None:
    spec = spec_of(family)
    source = ModelSource("tiny", tiny_model(family, FLAVOURS[family]))
    expert = spec.inspect(source).experts[0]
    denoiser = spec.load_denoiser(source, expert, Placement(torch.device("cpu"), torch.float32))
    answer(denoiser, torch.float32)
    assert any(masks) == spec.attention.masked
    assert any(_calls_torch_itself(module) for module in denoiser.modules()) == (not spec.attention.dispatched)
    hopper = AttentionFacts(
        "cuda", torch.bfloat16, (9, 0), masked=spec.attention.masked, dispatched=spec.attention.dispatched
    )
    assert choose_attention("auto", hopper).backend == (None if family == "qwen_image" else "_native_cudnn")
