"""`check_sample` rejects by the weights' files what the loaded pipeline would reject."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gracetune.errors import ConfigError
from gracetune.models.registry import spec_of
from gracetune.models.source import ModelSource
from gracetune.models.spec import SampleRequest
from unit.models import loaded

IMAGE = Image.new("RGB", (64, 64))
SIZE = {"width": 1001, "height": 1004}
MANY, NONE = {"references": (IMAGE,) * 3}, {"references": ()}
CASES: list[tuple[str, str, tuple[Any, ...], list[dict[str, Any]]]] = [
    ("wan", "t2v-14b-2.2", (), [SIZE, {"frames": 8}, {**SIZE, **MANY, "frames": 8}]),
    ("wan", "t2v-1.3b-2.1", (), [SIZE, MANY]),
    ("wan", "ti2v-5b-2.2", (), [SIZE, {"height": 80}, MANY]),
    ("wan", "i2v-14b-2.2", (IMAGE,), [SIZE, NONE, MANY]),
    ("wan", "i2v-14b-480p-2.1", (IMAGE,), [SIZE, NONE, MANY]),
    ("qwen_image", "t2i", (), [SIZE, MANY, {**SIZE, "steps": 1}]),
    ("qwen_image", "edit", (IMAGE,), [{**SIZE, **NONE}, MANY]),
    ("qwen_image", "edit-2509", (IMAGE, IMAGE), [SIZE, NONE, {"steps": 1}]),
    ("flux", "dev", (), [{**SIZE, **MANY}]),
    ("flux", "kontext", (IMAGE,), [SIZE, NONE, MANY]),
    ("flux2", "dev", (IMAGE,), [SIZE, {"references": (Image.new("RGB", (48, 64)),)}]),
    ("z_image", "base", (), [{**SIZE, **MANY}]),
    ("krea2", "raw", (), [{**SIZE, **MANY}]),
    ("sdxl", "base-1.0", (), [SIZE, MANY]),
    ("stable_audio", "open-1.0", (), [MANY]),
]
"""Family, flavour, number of input images, and the invalid change."""


@pytest.mark.parametrize(("family", "flavour", "references", "changes"), CASES)
def test_rejected_like_the_pipeline_without_loading(
    family: str, flavour: str, references: tuple[Any, ...], changes: list[dict[str, Any]],
    tiny_model: Callable[[str, str], Path],
) -> None:  # fmt: skip
    folder, spec = tiny_model(family, flavour), spec_of(family)
    facts, pipeline = spec.inspect(ModelSource("tiny", folder)), loaded.pipeline(family, folder)
    fine = SampleRequest("a cat", width=64, height=96, steps=2, references=references)
    spec.check_sample(fine, facts)
    spec.check_sample(replace(fine, width=0, height=0), facts)
    for change in changes:
        request = replace(fine, **change)
        with pytest.raises(ConfigError) as early:
            spec.check_sample(request, facts)
        with pytest.raises(ConfigError) as late:
            spec.sample(pipeline, request)
        assert early.value.problems == late.value.problems


def test_the_5b_supports_an_optional_first_frame(tiny_model: Callable[[str, str], Path]) -> None:
    spec = spec_of("wan")
    facts = spec.inspect(ModelSource("tiny", tiny_model("wan", "ti2v-5b-2.2")))
    for references in ((), (IMAGE,)):
        spec.check_sample(SampleRequest("a cat", width=64, height=96, references=references), facts)
