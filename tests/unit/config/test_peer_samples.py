"""Published files train unchanged: the samples they request can be generated, or are left out with a note."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gracetune.config import Environment, Resolved, load
from gracetune.config.rules import known_flavour
from gracetune.models.registry import spec_of
from gracetune.models.source import ModelSource
from gracetune.train.sample_requests import requests_of
from unit.config.aitoolkit_jobs import write
from unit.config.test_aitoolkit_peers import PEERS

ACCEPTED = {peer["name"]: peer["keys"] for peer in PEERS if peer["with_allow_unsupported"] == "accepted"}
TinyModel = Callable[[str, str], Path]


def resolved(folder: Path, name: str, *flags: str, **sample: Any) -> Resolved:
    keys = {**ACCEPTED[name]}
    if sample:
        process = keys["config"]["process"][0]
        keys["config"] = {**keys["config"], "process": [{**process, "sample": {**process["sample"], **sample}}]}
    path = write(folder, keys, "job.json")
    return load(path, environment=Environment({}), overrides=flags, allow_unsupported=True)


@pytest.mark.parametrize("name", ACCEPTED)
def test_samples_of_published_jobs_can_be_generated(name: str, tmp_path: Path, tiny_model: TinyModel) -> None:
    config = resolved(tmp_path, name).config
    flavour = known_flavour(config)
    assert flavour is not None
    spec, folder = spec_of(config.model.family), tiny_model(config.model.family, flavour.name)
    facts = spec.inspect(ModelSource(str(folder), folder))
    for requested in requests_of(config):
        images = tuple(Image.new("RGB", (64, 64)) for _ in requested.references)
        spec.check_sample(replace(requested.request, references=images), facts)


def test_frames_are_rounded_as_upstream_rounds_them(tmp_path: Path) -> None:
    found = resolved(tmp_path, "train_lora_wan21_1b_24gb")
    assert found.config.validation.num_frames == 41
    assert any("num_frames: 40 frames become 41" in note for note in found.notes)
    requested = resolved(tmp_path, "train_lora_wan21_1b_24gb", "validation.num_frames=40").config
    assert requested.validation.num_frames == 40, "a value from a flag is not rounded"


def test_a_sample_without_an_image_is_left_out_if_the_model_needs_one(tmp_path: Path) -> None:
    none = resolved(tmp_path, "ui:wan22_14b_i2v")
    assert none.config.validation.prompts == ()
    assert any("not generated, because i2v-14b-2.2 needs an input image" in note for note in none.notes)
    (tmp_path / "start.png").touch()
    samples = [{"prompt": "one"}, {"prompt": "two", "ctrl_img": str(tmp_path / "start.png"), "seed": 7}]
    some = resolved(tmp_path, "ui:wan22_14b_i2v", samples=samples)
    assert [(one.prompt, one.seed) for one in some.config.validation.prompts] == [("two", 7)]
    assert some.origins["validation", "prompts", 0, "seed"].key.endswith("samples[1].seed")
