"""The ways of computing a block that are to be timed against each other compute the same."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def variants() -> ModuleType:
    place = importlib.util.spec_from_file_location("block_variants", ROOT / "benchmarks" / "block_variants.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    sys.modules["block_variants"] = module  # its dataclasses look themselves up there
    place.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["joined", "widened", "widest", "lokr-sum", "joined-fp8"])
def test_a_way_that_claims_anothers_numbers_has_them(variants: ModuleType, name: str) -> None:
    size = variants.Size(heads=1, ffn=256, image_tokens=48, text_tokens=16, blocks=2)

    def found(way: str) -> tuple[float, float]:
        step = variants.step_of(variants.WAYS[way], size, torch.device("cpu"), torch.float32, compiled=False)
        size_of: tuple[float, float] = variants.gradient_size(step)
        return size_of

    wanted, got = found(variants.WAYS[name].same_as), found(name)
    assert wanted[1] > 0
    assert got == pytest.approx(wanted, rel=1e-3 if "fp8" in name else 1e-5)
    assert got[0] != pytest.approx(found("frozen")[0], rel=1e-3)  # the adapter is in it
