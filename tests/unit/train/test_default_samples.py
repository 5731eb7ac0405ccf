"""Captions of the dataset are the prompts of a config that has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.models.fact_overrides import facts_of
from gracetune.models.registry import spec_of
from gracetune.models.source import ModelSource
from gracetune.train.default_samples import FEWEST_STEPS, DefaultSamples, default_samples
from runs.made_runs import TinyModel, config_for, images

LONG = {"training": {"max_steps": 2000}}


def chosen(
    tiny_model: TinyModel, tmp_path: Path, family: str = "sdxl", flavour: str = "base-1.0", **sections: Any
) -> DefaultSamples:
    config = config_for(family, tiny_model, tmp_path, flavour=flavour, **{**LONG, **sections})
    spec = spec_of(family)
    return default_samples(config, spec, facts_of(config, spec, ModelSource("tiny", tiny_model(family, flavour))))


def test_captions_are_prompts_ten_times_a_run_and_before_the_first_step(tiny_model: TinyModel, tmp_path: Path) -> None:
    found = chosen(tiny_model, tmp_path)
    assert (found.validation.at_start, found.validation.every_steps) == (True, 200)
    prompts = [(one.prompt, one.width, one.height) for one in found.validation.prompts]
    assert prompts == [("picture number 0", 64, 64), ("picture number 2", 64, 64)]
    assert found.line == "samples at the start and every 200 steps of 2 captions of pictures; --no-samples for none"


def test_the_caption_is_as_it_is_trained(tiny_model: TinyModel, tmp_path: Path) -> None:
    dataset = {"id": "d", "path": str(images(tmp_path / "d")), "resolution": 64.0,
               "captions": {"strategy": "instanceprompt", "instance_prompt": "sks dog"}}  # fmt: skip
    found = chosen(tiny_model, tmp_path, datasets=[dataset], training={"max_steps": None, "epochs": 30})
    assert [one.prompt for one in found.validation.prompts] == ["sks dog"]
    assert (found.validation.every_steps, found.validation.every_epochs) == (None, 3)


@pytest.mark.parametrize(
    "sections",
    [
        {"validation": {"enabled": False}},
        {"validation": {"prompts": [{"prompt": "mine"}]}},
        {"training": {"max_steps": FEWEST_STEPS - 1}},
    ],
)
def test_what_the_config_says_and_trials_stay(sections: dict[str, Any], tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("sdxl", tiny_model, tmp_path, **{**LONG, **sections})
    assert chosen(tiny_model, tmp_path, **sections) == DefaultSamples(config.validation)


def test_an_interval_of_the_config_stays(tiny_model: TinyModel, tmp_path: Path) -> None:
    found = chosen(tiny_model, tmp_path, validation={"every_steps": 7, "width": 32}, training={"max_steps": 20})
    assert (found.validation.at_start, found.validation.every_steps) == (False, 7)
    assert [one.width for one in found.validation.prompts] == [None, None]


@pytest.mark.parametrize(
    ("flavour", "dataset", "line"),
    [("edit", {}, "no samples: add validation.prompts; "), ("t2i", {"captions": {"extension": "none"}}, "no captions")],
)
def test_a_run_without_possible_samples_is_not_rejected(
    flavour: str, dataset: dict[str, Any], line: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    given = {"id": "d", "path": str(images(tmp_path / "d")), "resolution": 64.0, **dataset}
    found = chosen(tiny_model, tmp_path, "qwen_image", flavour, datasets=[given])
    assert found.validation.prompts == ()
    assert line in found.line
