"""The flow shift equals that of diffusers' own scheduler and pipelines when they sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from gracetune.diffusion.noise_levels import shifted
from gracetune.models.common.flow_shift import MEGAPIXEL_TOKENS, read_shift

LEVELS = np.linspace(0.001, 1.0, 50)
QWEN = {"base_image_seq_len": 256, "base_shift": 0.5, "max_image_seq_len": 8192, "max_shift": 0.9}


@pytest.mark.parametrize("kind", ["exponential", "linear"])
@pytest.mark.parametrize("numbers", [{}, QWEN], ids=["defaults", "qwen-image"])
def test_resolution_dependent_shift(numbers: dict[str, Any], kind: str) -> None:
    config = {"use_dynamic_shifting": True, "time_shift_type": kind, **numbers}
    at_a_megapixel, rule = read_shift(config)
    assert rule is not None
    assert at_a_megapixel == rule.at(MEGAPIXEL_TOKENS)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    named = {"base_image_seq_len": "base_seq_len", "max_image_seq_len": "max_seq_len"}
    theirs = {named.get(name, name): value for name, value in numbers.items()}
    for tokens in (256, 1024, 4096, 6000):
        expected = scheduler.time_shift(calculate_shift(tokens, **theirs), 1.0, LEVELS)
        assert [shifted(level, rule.at(tokens)) for level in LEVELS] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_constant_shift(shift: float) -> None:
    found, rule = read_shift({"shift": shift})
    assert rule is None
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    expected = scheduler.sigmas.numpy()
    levels = np.linspace(1, 1000, 1000)[::-1] / 1000
    assert [shifted(level, found) for level in levels] == pytest.approx(expected, rel=1e-6)


def test_empty_config_has_no_shift() -> None:
    assert read_shift({}) == (1.0, None)
