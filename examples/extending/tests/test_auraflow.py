"""What a family has to prove: `pip install -e .`, then `pytest tests`. A minute on a CPU, nothing is downloaded."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AuraFlowPipeline
from gracetune_auraflow import FAMILY
from gracetune_auraflow.footprint import FOOTPRINTS
from gracetune_auraflow.keys import KEYS
from gracetune_auraflow.published import build_published
from gracetune_auraflow.spec import SPEC
from PIL import Image
from torch import nn

from gracetune.extension import (
    AppliedAugmentation,
    Bucket,
    CaptionRef,
    ConfigError,
    EncodeOptions,
    Fit,
    ModelSource,
    PartPlacement,
    Prompt,
    Sample,
    SampleRef,
    tiny_model,
    to_pixels,
    traced_footprint,
)

CPU = PartPlacement(torch.device("cpu"), torch.float32)
CAPTIONS = ["a red cat", "a blue dog with a longer story"]
WIDTH, HEIGHT = 48, 32  # not square, so that exchanging them shows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(FAMILY, "v0.3", tmp_path_factory.mktemp("tiny"))


def source(folder: Path) -> ModelSource:
    return ModelSource("tiny", folder)


def image(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8))


def sample_of(image: Image.Image) -> Sample:
    ref = SampleRef(
        dataset="d", path="a.png", digest="0" * 32, bucket=Bucket(*image.size), fit=Fit(image.size, image.size),
        caption=CaptionRef(""), augmentation=AppliedAugmentation(), conditioning=(),
    )  # fmt: skip
    return Sample(ref, to_pixels([image])[:, 0], None, None, ())


def batch_of(folder: Path) -> dict[str, torch.Tensor]:
    texts = SPEC.load_text_encoder(source(folder), CPU).encode([Prompt(caption) for caption in CAPTIONS])
    latents = SPEC.load_latent_encoder(source(folder), CPU, EncodeOptions()).encode(
        [sample_of(image(seed)) for seed in range(len(CAPTIONS))]
    )
    entries = [{**text, **image} for text, image in zip(texts, latents, strict=True)]
    return {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}


def test_latents_are_those_the_pipeline_decodes(folder: Path) -> None:
    vae: Any = AuraFlowPipeline.from_pretrained(folder).vae
    for seed, latents in enumerate(batch_of(folder)["latents"]):
        pixels = sample_of(image(seed)).pixels
        assert pixels is not None
        with torch.no_grad():
            mean = vae.encode(pixels[None]).latent_dist.mean
        torch.testing.assert_close(latents / vae.config.scaling_factor, mean[0])


def test_the_traced_footprint_is_the_published_models() -> None:
    footprint = traced_footprint(FOOTPRINTS[0], None)
    model = build_published("v0.3")
    assert sum(parameter.numel() for parameter in model.parameters()) == footprint.parameters
    for block in footprint.blocks:
        for linear in block.linears:
            found = [
                module
                for name, module in model.named_modules()
                if isinstance(module, nn.Linear) and fnmatchcase(name, f"{block.name}.{linear.name}")
            ]
            assert len(found) == block.count, linear.name
            shapes = {(module.in_features, module.out_features, module.bias is not None) for module in found}
            assert shapes == {(linear.inputs, linear.outputs, linear.bias)}, linear.name
    counted = {f"{one.name}.{linear.name}" for one in footprint.blocks for linear in one.linears if linear.default}
    assert counted == {*SPEC.default_targets}


def test_every_layer_has_one_name_that_leads_back() -> None:
    layers = [name for name, module in build_published("v0.3").named_modules() if isinstance(module, nn.Linear)]
    for name in layers:
        original = KEYS.original(name)
        assert original is not None, name
        for spelled in (original.name, original.name.replace(".", "_"), name.replace(".", "_")):
            place = KEYS.find(spelled)
            assert place is not None, spelled
            assert place.paths == (name,), spelled


def test_a_folder_of_another_family_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="AuraFlowPipeline"):
        SPEC.inspect(source(tiny_model("sdxl", "base-1.0", tmp_path)))


def test_the_checklist_passes() -> None:
    """Encoding, the prediction, adapters, files, compilation, CUDA graphs, memory, samples and resuming."""
    command = [sys.executable, "-m", "gracetune", "family", "check", FAMILY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
