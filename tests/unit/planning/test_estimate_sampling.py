"""Memory for generating samples: a separate phase with the VAE, and with text encoders only where they are loaded."""

from __future__ import annotations

from typing import Any

import pytest

from gracetune.planning.demand import Demand
from gracetune.planning.layout import PlanChoice, lay_out
from gracetune.planning.memory_tiers import tiers_of
from unit.hardware.machines import load as load_machine
from unit.planning.test_estimate import demand_of, need, run_config

GENERATED: dict[str, Any] = {"enabled": True, "every_steps": 10, "prompts": [{"prompt": "a fox"}]}


def requested(family: str, flavour: str, **sections: Any) -> Demand:
    return demand_of(run_config(family, model={"flavour": flavour}, validation=GENERATED, **sections))


@pytest.mark.parametrize(
    ("family", "flavour", "encoder", "in_memory"),
    [
        ("wan", "t2v-14b-2.2", "text encoder (UMT5-XXL)", False),
        ("flux", "dev", "text encoder (T5-XXL)", False),
        ("qwen_image", "t2i", "text encoder (Qwen2.5-VL 7B)", False),
        ("qwen_image", "edit-2509", "text encoder (Qwen2.5-VL 7B)", True),
        ("stable_audio", "open-1.0", "text encoder (T5-base)", True),
        ("wan", "i2v-14b-480p-2.1", "image encoder (CLIP ViT-H)", True),
    ],
)
def test_encoders_are_counted_while_they_generate_samples(
    family: str, flavour: str, encoder: str, in_memory: bool
) -> None:
    demand = requested(family, flavour)
    assert ("sample" in need(demand, encoder).busy) is in_memory
    assert [one.name for one in demand.needs if one.name == "encoding the prompts"] == [
        "encoding the prompts"
    ] * in_memory
    codec = next(one for one in demand.needs if one.name.startswith("VAE ("))
    assert "sample" in codec.busy
    unasked = demand_of(run_config(family, model={"flavour": flavour}))
    assert "sample" not in need(unasked, encoder).busy


def test_a_parked_encoder_comes_back_for_samples_that_need_it() -> None:
    """On a discrete GPU parked encoders are in host memory during training and on the GPU during sampling."""
    machine = load_machine("x86-h200")
    tiers = tiers_of(machine, None)
    size = need(requested("qwen_image", "edit-2509"), "text encoder (Qwen2.5-VL 7B)").bytes
    edits, draws = (
        lay_out(
            requested("qwen_image", flavour), PlanChoice("off", "bf16", 1, 1, False, park_encoders=True), machine, tiers
        )
        for flavour in ("edit-2509", "t2i")
    )

    def held(layout: Any, phase: str) -> int:
        return sum(
            line.bytes for line in layout.lines
            if line.tier == "device" and phase in line.phases and line.name.startswith("text encoder")
        )  # fmt: skip

    assert (held(edits, "sample"), held(edits, "train")) == (size, 0)
    assert (held(draws, "sample"), held(draws, "train")) == (0, 0)
