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
from gracetune.models.spec import FromEmbeddings, Placement, SampleRequest

TinyModel = Callable[[str, str], Path]
CPU = Placement(torch.device("cpu"), torch.float32)
ASKED = SampleRequest("a fox in the snow", width=64, height=64, frames=1, steps=3, guidance=3.0, seed=5)


@pytest.mark.parametrize(
    ("family", "flavour", "negative"),
    [
        ("wan", "t2v-14b-2.2", "blurred"),
        pytest.param("wan", "t2v-14b-2.2", "", marks=pytest.mark.full),
        pytest.param("sdxl", "base-1.0", "blurred", marks=pytest.mark.full),
        pytest.param("sdxl", "base-1.0", "", marks=pytest.mark.full),
        pytest.param("qwen_image", "t2i", "", marks=pytest.mark.full),
        pytest.param("qwen_image", "t2i", "blurred", marks=pytest.mark.full),
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
    facts, how = spec.inspect(source), spec.from_embeddings
    assert isinstance(how, FromEmbeddings)
    assert how.refusal(facts) is None
    request = replace(ASKED, negative_prompt=negative)
    if flavour == "kontext":
        request = replace(request, references=(Image.fromarray(np.full((64, 64, 3), 90, dtype=np.uint8)),))
    whole = spec.load_pipeline(source, {}, CPU, facts)
    encoder = spec.load_text_encoder(source, CPU)
    # One at a time, as the pipeline does: CLIP's last bits depend on how many there are.
    prompt, avoided = (encoder.encode([Prompt(text)])[0] for text in (request.prompt, negative or how.no_wish))
    given = replace(request, embeds=prompt, negative_embeds=avoided)
    textless = how.load_pipeline(source, {}, CPU, facts)
    assert textless.text_encoder is None
    frames = [np.asarray(spec.sample(*one).frames[0]) for one in ((whole, request), (textless, given))]
    assert np.array_equal(*frames)
    other = replace(given, embeds=encoder.encode([Prompt("another picture")])[0])
    assert not np.array_equal(np.asarray(spec.sample(textless, other).frames[0]), frames[0])


@pytest.mark.full
@pytest.mark.parametrize("family", [*FOOTPRINTS])
def test_memory_plan_counts_the_text_encoders_used_for_samples(family: str, tiny_model: TinyModel) -> None:
    spec = spec_of(family)
    how = spec.from_embeddings
    for footprint in FOOTPRINTS[family]:
        refused: str | None = how if isinstance(how, str) else None
        if isinstance(how, FromEmbeddings):
            path = str(tiny_model(family, footprint.flavour))
            refused = how.refusal(spec.inspect(open_source(Model.model_validate({"family": family, "path": path}))))
        spoken = [encoder for encoder in footprint.encoders if encoder.kind == "text"]
        assert {encoder.draws for encoder in spoken} == {refused is not None}, footprint.flavour
        assert all(encoder.draws for encoder in footprint.encoders if encoder.kind == "vision")
