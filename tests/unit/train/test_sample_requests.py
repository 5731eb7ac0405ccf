"""Samples that cannot be generated are rejected before a run starts. The error names the config key to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError, Problem
from gracetune.models.fact_overrides import facts_of
from gracetune.models.registry import spec_of
from gracetune.models.source import ModelSource
from gracetune.train.sample_requests import check_requests, requests_of

TinyModel = Callable[[str, str], Path]


def requested(family: str, validation: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "n", "output_dir": "o", "model": {"family": family}, "datasets": [{"id": "d", "path": "p"}],
            "training": {"max_steps": 1}, "validation": validation,
        }
    )  # fmt: skip


def rejected(family: str, flavour: str, tiny_model: TinyModel, validation: dict[str, Any]) -> list[Problem]:
    config, spec = requested(family, {"every_steps": 1, **validation}), spec_of(family)
    with pytest.raises(ConfigError) as error:
        check_requests(config, spec, facts_of(config, spec, ModelSource("tiny", tiny_model(family, flavour))), print)
    return list(error.value.problems)


def test_all_problems_are_reported_at_once_with_their_keys(tiny_model: TinyModel) -> None:
    prompts = [{"prompt": "a"}, {"prompt": "b", "width": 90, "num_frames": 8}, {"prompt": "c", "width": 64}]
    found = rejected(
        "wan", "t2v-14b-2.2", tiny_model,
        {"width": 1000, "height": 64, "prompts": prompts, "images_per_prompt": 2},
    )  # fmt: skip
    assert found == [
        Problem("validation.width", "1000", "a multiple of 16", "992"),
        Problem("validation.prompts[1].width", "90", "a multiple of 16", "96"),
        Problem("validation.prompts[1].num_frames", "8", "4 k + 1 frames", "9"),
    ]


@pytest.mark.parametrize(
    ("family", "flavour", "validation", "key"),
    [
        ("wan", "i2v-14b-2.2", {"prompts": [{"prompt": "a"}]}, "validation.prompts[0].references"),
        ("qwen_image", "edit", {"prompts": [{"prompt": "a"}]}, "validation.prompts[0].references"),
        ("qwen_image", "t2i", {"steps": 1, "prompts": [{"prompt": "a"}]}, "validation.steps"),
        ("sdxl", "base-1.0", {"prompts": [{"prompt": "a", "height": 30}]}, "validation.prompts[0].height"),
    ],
)
def test_every_family_checks_its_own_samples(
    family: str, flavour: str, validation: dict[str, Any], key: str, tiny_model: TinyModel
) -> None:
    assert [problem.key for problem in rejected(family, flavour, tiny_model, validation)] == [key]


def test_references_that_are_not_images(tiny_model: TinyModel, tmp_path: Path) -> None:
    """This includes a file with a valid header and broken pixels: images are decoded, not only opened."""
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:1000])
    (tmp_path / "text.png").write_text("no picture")
    names = [str(tmp_path / name) for name in ("text.png", "cut.png", "gone.png", "whole.png")]
    prompts = [{"prompt": "a", "references": [name]} for name in names]
    found = rejected("qwen_image", "edit", tiny_model, {"prompts": prompts})
    assert [problem.key for problem in found] == [f"validation.prompts[{number}].references" for number in range(3)]
    assert [problem.found.split(": ")[0] for problem in found] == names[:3]
    assert "not an image" in found[0].found
    assert "cannot be decoded" in found[1].found
    assert "No such file" in found[2].found


def test_samples_that_are_not_generated_are_not_checked(tiny_model: TinyModel) -> None:
    spec = spec_of("wan")
    facts = spec.inspect(ModelSource("tiny", tiny_model("wan", "t2v-14b-2.2")))
    prompts = [{"prompt": "a", "width": 90}]
    warned: list[str] = []
    check_requests(requested("wan", {"enabled": False, "prompts": prompts}), spec, facts, warned.append)
    assert warned == []
    check_requests(requested("wan", {"prompts": prompts}), spec, facts, warned.append)  # on request alone
    assert warned
    assert all("samples cannot be generated as requested" in line for line in warned)
    outside = replace(spec, check_sample=type(spec).check_sample)  # a family that says nothing about its requests
    check_requests(requested("wan", {"every_steps": 1, "prompts": prompts}), outside, facts, warned.append)


def test_a_generator_takes_every_seed_a_config_may_have() -> None:
    highest = {"seed": 2**63 - 1, "walk_seed": True, "images_per_prompt": 2}
    config = requested("wan", {**highest, "prompts": [{"prompt": "a"}, {"prompt": "b"}]})
    assert [torch.Generator().manual_seed(one.request.seed).initial_seed() for one in requests_of(config)] == [
        2**63 - 1, 2**63, 2**63, 2**63 + 1
    ]  # fmt: skip
    for wrong in ({"seed": 2**64}, {"prompts": [{"prompt": "a", "seed": 2**64}]}):
        with pytest.raises(ValidationError, match="seed"):
            requested("wan", wrong)


@pytest.mark.parametrize(("family", "flavour", "message"), [("sdxl", "base-1.0", []), ("flux", "dev", ["flux"])])
def test_guidance_rescale_is_used_or_reported_as_unused(
    tiny_model: TinyModel, family: str, flavour: str, message: list[str]
) -> None:
    config, spec = requested(family, {"guidance_rescale": 0.5, "prompts": [{"prompt": "a"}]}), spec_of(family)
    heard: list[str] = []
    facts = facts_of(config, spec, ModelSource("tiny", tiny_model(family, flavour)))
    check_requests(config, spec, facts, heard.append)
    wanted = [f"validation.guidance_rescale is not used: the pipeline of {name} has no such option" for name in message]
    assert [line for line in heard if "rescale" in line] == wanted
    assert requests_of(config)[0].request.guidance_rescale == 0.5
