"""The estimate against torch's own counter on one H200: every row of the table in docs/estimate.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import pytest

from gracetune.config.run_config import RunConfig
from gracetune.models.registry import footprint_of
from gracetune.planning.activations import RecomputePolicy
from gracetune.planning.dataset_facts import DatasetFacts
from gracetune.planning.estimate import estimate
from gracetune.units import GIB

LOKR = {"kind": "lokr", "factor": 16, "full_rank": True}


class Row(NamedTuple):
    """Wan2.2 14B, one expert, one frame of 1024x1024, AdamW; peak of torch.cuda.max_memory_allocated in GiB."""

    what: str
    peak: float
    adapter: dict[str, Any]
    path: Literal["auto", "reference"]
    compiled: bool
    policy: RecomputePolicy
    batch: int = 1
    precision: str = "bf16"
    tolerance: float = 0.05
    nominal: bool = False
    """Measured with a budget of 0.5, where `half` is 0.45 now: compared with half of the activations."""


ROWS = [
    Row("peft LoRA, eager, checkpointed", 30.9, {"kind": "lora"}, "reference", False, "full"),
    Row("peft LoRA, eager", 72.2, {"kind": "lora"}, "reference", False, "off"),
    Row("peft LoRA, compiled", 64.0, {"kind": "lora"}, "reference", True, "off"),
    Row("plain LoRA, compiled", 60.5, {"kind": "lora"}, "auto", True, "off"),
    Row("plain LoRA, compiled, budget 0.5", 43.6, {"kind": "lora"}, "auto", True, "half", nominal=True),
    Row("LoRA, compiled, half", 42.135, {"kind": "lora"}, "auto", True, "half", tolerance=0.02),
    Row("plain LoRA, compiled, fp8", 60.6, {"kind": "lora"}, "auto", True, "off", precision="fp8"),
    Row("the same, batch 4, budget 0.5", 91.7, {"kind": "lora"}, "auto", True, "half", 4, "fp8", nominal=True),
    Row("LyCORIS LoKr, eager, checkpointed", 31.0, LOKR, "reference", False, "full"),
    Row("LyCORIS LoKr, eager", 87.0, LOKR, "reference", False, "off"),
    Row("LyCORIS LoKr, compiled", 82.0, LOKR, "reference", True, "off"),
    Row("LyCORIS LoCon, eager, checkpointed", 31.0, {"kind": "locon"}, "reference", False, "full"),
    Row("LyCORIS LoCon, eager", 88.0, {"kind": "locon"}, "reference", False, "off"),
    Row("LyCORIS LoCon, compiled", 83.0, {"kind": "locon"}, "reference", True, "off"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_within_five_percent_of_the_measurement(row: Row) -> None:
    """The documentation promises ten percent; the derivation from first principles is better and should stay so."""
    config = RunConfig.model_validate(
        {
            "name": "run",
            "output_dir": "out",
            "model": {"family": "wan", "experts": "high", "base_precision": row.precision},
            "datasets": [{"id": "pictures", "path": "/nowhere", "resolution": 1024}],
            "training": {"max_steps": 1, "batch_size": row.batch},
            "adapter": {"rank": 16, **row.adapter},
            "validation": {"enabled": False},
        }
    )
    footprint, _ = footprint_of(config.model)
    if row.nominal:
        footprint = replace(footprint, blocks=tuple(replace(block, budgets=()) for block in footprint.blocks))
    facts = (DatasetFacts("pictures", 1, 1),)
    demand = estimate(config, footprint, facts, compiled=row.compiled, adapter_path=row.path)
    assert demand.training_peak(row.policy) / GIB == pytest.approx(row.peak, rel=row.tolerance)


@pytest.mark.parametrize(("family", "peak"), [("flux", 50.519), ("qwen_image", 68.877)])
def test_traced_families_within_two_percent(family: str, peak: float) -> None:
    """LoRA, compiled, one image of 1024x1024 (`steps-families-h200.json`)."""
    config = RunConfig.model_validate(
        {
            "name": "run",
            "output_dir": "out",
            "model": {"family": family, "base_precision": "bf16"},
            "datasets": [{"id": "pictures", "path": "/nowhere", "resolution": 1024}],
            "training": {"max_steps": 1},
            "adapter": {"kind": "lora", "rank": 16},
            "validation": {"enabled": False},
        }
    )
    footprint, _ = footprint_of(config.model)
    demand = estimate(config, footprint, (DatasetFacts("pictures", 1, 1),), compiled=True)
    assert demand.training_peak("off") / GIB == pytest.approx(peak, rel=0.02)
