"""Samples generated from cached embeddings equal those the whole pipeline generates from texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gracetune.cache.encoder import Prompt
from gracetune.config.run_config import Model
from gracetune.models.registry import FOOTPRINTS, spec_of
from gracetune.models.source import open_source
from gracetune.models.spec import FromEmbeddings, PartPlacement, SampleRequest

TinyModel = Callable[[str, str], Path]
CPU = PartPlacement(torch.device("cpu"), torch.float32)
REQUESTED = SampleRequest("a fox in the snow", width=64, height=64, frames=1, steps=3, guidance=3.0, seed=5)


@pytest.mark.parametrize(
    ("family", "flavour", "negative"),
    [
        ("wan", "t2v-14b-2.2", "blurred"),
        pytest.param("wan", "t2v-14b-2.2", "", marks=pytest.mark.full),
        pytest.param("sdxl", "base-1.0", "blurred", marks=pytest.mark.full),
        pytest.param("sdxl", "base-1.0", "", marks=pytest.mark.full),
        pytest.param("qwen_image", "t2i", "", marks=pytest.mark.full),
        pytest.param("qwen_image", "t2i", "blurred", marks=pytest.mark.full),
        ("flux2", "klein-base-4b", "blurred"),
        pytest.param("flux2", "dev", "", marks=pytest.mark.full),
        ("z_image", "base", "blurred"),
        ("krea2", "raw", "blurred and a few words more"),
        pytest.param("z_image", "turbo", "", marks=pytest.mark.full),
        pytest.param("flux", "dev", "", marks=pytest.mark.full),
        pytest.param("flux", "schnell", "", marks=pytest.mark.full),
        pytest.param("flux", "kontext", "", marks=pytest.mark.full),
    ],
)
def test_samples_are_equal_with_and_without_text_encoders(
    family: str, flavour: str, negative: str, tiny_model: TinyModel
) -> None:
    spec = spec_of(family)
    source = open_source(Model.model_validate({"family": family, "path": str(tiny_model(family, flavour))}))
    facts, mode = spec.inspect(source), spec.from_embeddings
    assert isinstance(mode, FromEmbeddings)
    assert mode.rejection(facts) is None
    request = replace(REQUESTED, negative_prompt=negative)
    if flavour == "kontext":
        request = replace(request, references=(Image.fromarray(np.full((64, 64, 3), 90, dtype=np.uint8)),))
    whole = spec.load_pipeline(source, {}, CPU, facts)
    encoder = spec.load_text_encoder(source, CPU)
    # One at a time, as the pipeline does: CLIP's last bits depend on how many there are.
    prompt, avoided = (
        encoder.encode([Prompt(text)])[0] for text in (request.prompt, negative or mode.default_negative)
    )
    given = replace(request, embeds=prompt, negative_embeds=avoided)
    textless = mode.load_pipeline(source, {}, CPU, facts)
    assert textless.text_encoder is None
    frames = [np.asarray(spec.sample(*one).frames[0]) for one in ((whole, request), (textless, given))]
    assert np.array_equal(*frames)
    other = replace(given, embeds=encoder.encode([Prompt("another picture")])[0])
    assert not np.array_equal(np.asarray(spec.sample(textless, other).frames[0]), frames[0])


@pytest.mark.full
@pytest.mark.parametrize("family", [*FOOTPRINTS])
def test_memory_plan_counts_the_text_encoders_used_for_samples(family: str, tiny_model: TinyModel) -> None:
    spec = spec_of(family)
    mode = spec.from_embeddings
    for footprint in FOOTPRINTS[family]:
        rejected: str | None = mode if isinstance(mode, str) else None
        if isinstance(mode, FromEmbeddings):
            path = str(tiny_model(family, footprint.flavour))
            rejected = mode.rejection(spec.inspect(open_source(Model.model_validate({"family": family, "path": path}))))
        spoken = [encoder for encoder in footprint.encoders if encoder.kind == "text"]
        assert {encoder.works_while_sampling for encoder in spoken} == {rejected is not None}, footprint.flavour
        assert all(encoder.works_while_sampling for encoder in footprint.encoders if encoder.kind == "vision")
