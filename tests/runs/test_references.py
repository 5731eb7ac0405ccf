"""Runs with references: edit pairs beside images without any, for a model that trains on both."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from gracetune.telemetry.events import ValidationDone
from runs.made_runs import TinyModel, config_for, images, run
from runs.test_resume import Interrupting, assert_same_end, losses
from runs.test_validation import events


@pytest.mark.full
def test_edit_pairs_and_images_alone_in_one_resumed_run(tiny_model: TinyModel, tmp_path: Path) -> None:
    before, after, alone = (str(images(tmp_path / name, count=2)) for name in ("before", "after", "alone"))
    reference = tmp_path / "reference.png"
    Image.new("RGB", (64, 80), "red").save(reference)
    data = [
        {"id": "before", "path": before, "dataset_type": "conditioning", "resolution": 64.0},
        {"id": "after", "path": after, "conditioning": ["before"], "resolution": 64.0},
        {"id": "alone", "path": alone, "resolution": 64.0},
    ]
    prompts = [{"prompt": "a cat"}, {"prompt": "a red cat", "references": [str(reference)]}]
    validation = {"every_steps": 4, "prompts": prompts, "steps": 2, "width": 32, "height": 32, "at_start": False}
    sections = {"datasets": data, "validation": validation, "training": {"max_steps": 4},
                "checkpoints": {"every_steps": 4}}  # fmt: skip
    whole = config_for("flux2", tiny_model, tmp_path / "whole", **sections)
    assert run(whole).files
    parted = config_for("flux2", tiny_model, tmp_path / "parted", **sections)
    run(parted, Interrupting(2))
    run(parted)
    assert losses(parted) == losses(whole)
    assert_same_end(whole, parted, 4)
    (generated,) = events(whole, ValidationDone)
    assert len(generated.files) == 2
