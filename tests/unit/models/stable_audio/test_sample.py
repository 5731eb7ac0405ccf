from __future__ import annotations

import pytest
import torch
from PIL import Image

from gracetune.errors import ConfigError
from gracetune.models.spec import SampleRequest
from gracetune.models.stable_audio.spec import SPEC
from unit.models import loaded
from unit.models.stable_audio.cases import CPU, HOP, RATE, TinyModel, source_of


@pytest.mark.parametrize(("seconds", "samples", "avoided"), [(0.0, 32 * HOP, ""), (1.0, RATE, "noise")])
def test_audio_has_the_requested_length(tiny_model: TinyModel, seconds: float, samples: int, avoided: str) -> None:
    pipeline = loaded.pipeline("stable_audio", source_of(tiny_model).folder)
    request = SampleRequest("a dog", avoided, seconds=seconds, steps=3, seed=5)
    generated = SPEC.sample(pipeline, request)
    assert generated.frames == ()
    assert generated.sample_rate == RATE
    assert generated.audio is not None
    assert generated.audio.shape == (2, samples)
    assert bool(generated.audio.isfinite().all())
    assert float(generated.audio.std()) > 0
    again = SPEC.sample(pipeline, request).audio
    assert again is not None
    assert torch.equal(generated.audio, again)


def test_the_given_denoiser_is_used(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model)
    (expert,) = SPEC.inspect(source).experts
    denoiser = SPEC.load_denoiser(source, expert, CPU)
    assert SPEC.load_pipeline(source, {"transformer": denoiser}, CPU).transformer is denoiser


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (SampleRequest("a dog", seconds=9.0), "seconds\n.*9\n.*from 0 to 1.5"),
        (SampleRequest("a dog", references=(Image.new("RGB", (8, 8)),)), "references"),
    ],
)
def test_unsupported_requests_are_rejected(tiny_model: TinyModel, request_: SampleRequest, message: str) -> None:
    pipeline = loaded.pipeline("stable_audio", source_of(tiny_model).folder)
    with pytest.raises(ConfigError, match=message):
        SPEC.sample(pipeline, request_)
