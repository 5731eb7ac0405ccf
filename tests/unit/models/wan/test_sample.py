from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from gracetune.errors import ConfigError
from gracetune.models.source import ModelSource
from gracetune.models.spec import SampleRequest
from gracetune.models.wan.spec import SPEC
from unit.models import loaded
from unit.models.wan.cases import CASES, CPU, Case, TinyModel, image, source_of

LANDSCAPE = {"width": 96, "height": 64}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_frames_have_the_requested_size(tiny_model: TinyModel, case: Case) -> None:
    pipeline = loaded.pipeline("wan", tiny_model("wan", case.flavour))
    references = (image((100, 100)),) if case.from_image else ()
    request = SampleRequest("a cat", frames=5, steps=2, seed=3, references=references, **LANDSCAPE)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # what NaN earns on its way to bytes
        generated = SPEC.sample(pipeline, request)
    assert generated.audio is None
    assert generated.fps == (24.0 if case.flavour.startswith("ti2v") else 16.0)
    assert [frame.size for frame in generated.frames] == [(96, 64)] * 5
    assert np.asarray(generated.frames[0]).std() > 0
    again = SPEC.sample(pipeline, request)
    assert all(np.array_equal(one, other) for one, other in zip(generated.frames, again.frames, strict=True))


def test_image_is_one_frame_without_a_rate(tiny_model: TinyModel) -> None:
    pipeline = loaded.pipeline("wan", tiny_model("wan", "t2v-14b-2.2"))
    generated = SPEC.sample(pipeline, SampleRequest("a cat", steps=1, **LANDSCAPE))
    assert [frame.size for frame in generated.frames] == [(96, 64)]
    assert generated.fps is None


def test_the_given_expert_is_used_and_the_other_one_loaded(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model, "t2v-14b-2.2")
    high, low = SPEC.inspect(source).experts
    trained = SPEC.load_denoiser(source, low, CPU)
    request = SampleRequest("a cat", steps=3, seed=1, **LANDSCAPE)
    before = SPEC.sample(loaded.pipeline("wan", source.folder), request)
    with torch.no_grad():
        trained.get_parameter("proj_out.weight").mul_(2)
    pipeline = SPEC.load_pipeline(source, {low.component: trained}, CPU)
    assert getattr(pipeline, low.component) is trained
    assert getattr(pipeline, high.component) is not None
    assert not np.array_equal(SPEC.sample(pipeline, request).frames[0], before.frames[0])


def test_the_image_processor_of_the_published_folder_needs_no_torchvision(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model("wan", "i2v-14b-480p-2.1"), tmp_path / "published"))
    index = json.loads((folder / "model_index.json").read_text())
    index["image_processor"] = ["transformers", "CLIPImageProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    settings = json.loads((folder / "image_processor" / "preprocessor_config.json").read_text())
    settings["image_processor_type"] = "CLIPImageProcessor"
    (folder / "image_processor" / "preprocessor_config.json").write_text(json.dumps(settings))
    pipeline = SPEC.load_pipeline(ModelSource("published", folder), {}, CPU)
    request = SampleRequest("a cat", steps=1, references=(image((64, 64)),), **LANDSCAPE)
    expected = SPEC.sample(loaded.pipeline("wan", tiny_model("wan", "i2v-14b-480p-2.1")), request)
    assert np.array_equal(SPEC.sample(pipeline, request).frames[0], expected.frames[0])


@pytest.mark.parametrize(
    ("flavour", "change", "message"),
    [
        ("t2v-14b-2.2", {"width": 90}, "width\n.*90\n.*multiple of 16\n.*96"),
        ("ti2v-5b-2.2", {"height": 80}, "height\n.*80\n.*multiple of 32\n.*64"),
        ("t2v-14b-2.2", {"frames": 8}, "num_frames\n.*8\n.*4 k \\+ 1 frames\n.*9"),
        ("t2v-14b-2.2", {"references": 1}, "references\n.*1 images\n.*none: these weights have no image-to-video mode"),
        ("i2v-14b-2.2", {}, "references\n.*none\n.*continue a first frame"),
        ("i2v-14b-2.2", {"references": 2}, "references\n.*2 images\n.*1: the first frame"),
    ],
)
def test_unsupported_requests_are_rejected(
    tiny_model: TinyModel, flavour: str, change: dict[str, int], message: str
) -> None:
    pipeline = loaded.pipeline("wan", tiny_model("wan", flavour))
    references = tuple(image((64, 64), seed) for seed in range(change.get("references", 0)))
    with pytest.raises(ConfigError, match=message):
        SPEC.sample(pipeline, SampleRequest("a cat", steps=1, **{**LANDSCAPE, **change, "references": references}))
