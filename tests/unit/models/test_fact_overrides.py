"""A config's overrides of the weights' facts reach training and sampling, or are rejected by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.config.run_config import Model, Objective, RunConfig
from gracetune.errors import ConfigError
from gracetune.models.experts import noise_range_of
from gracetune.models.fact_overrides import facts_of, with_boundary, with_prediction
from gracetune.models.registry import spec_of
from gracetune.models.source import ModelSource
from gracetune.models.spec import ModelFacts, PartPlacement, SampleRequest
from unit.models.expert_levels import expert_at

CPU = PartPlacement(torch.device("cpu"), torch.float32)
TinyModel = Callable[[str, str], Path]


def config(family: str, objective: dict[str, Any] | None = None, **model: Any) -> RunConfig:
    return RunConfig(
        name="r",
        output_dir="out",
        model=Model(family=family, **model),  # type: ignore[arg-type]
        datasets=(),
        objective=Objective(**(objective or {})),
    )


def facts(tiny_model: TinyModel, family: str, flavour: str) -> tuple[ModelSource, ModelFacts]:
    source = ModelSource(flavour, tiny_model(family, flavour))
    return source, spec_of(family).inspect(source)


def test_expert_boundary_applies_to_training_and_sampling(tiny_model: TinyModel) -> None:
    spec, (source, own) = spec_of("wan"), facts(tiny_model, "wan", "t2v-14b-2.2")
    moved = facts_of(config("wan", expert_boundary=0.5), spec, source)
    assert noise_range_of("high_noise", moved) == (0.5, 1.0)
    assert noise_range_of("low_noise", moved) == (0.0, 0.5)
    assert expert_at(0.5, moved).name == "high_noise"
    assert facts_of(config("wan"), spec, source) == own
    requested: dict[str, list[float]] = {}
    for given in (None, moved):
        pipeline = spec.load_pipeline(source, {}, CPU, given)
        requested.clear()
        for name in ("transformer", "transformer_2"):
            times = requested.setdefault(name, [])

            def note(_module: Any, _args: Any, named: Any, times: list[float] = times) -> None:
                times.append(float(named["timestep"].max()))

            getattr(pipeline, name).register_forward_pre_hook(note, with_kwargs=True)
        spec.sample(pipeline, SampleRequest("a cat", width=16, height=16, steps=6, guidance=1.0))
        boundary = 875 if given is None else 500
        assert min(requested["transformer"]) >= boundary > max(requested["transformer_2"])


@pytest.mark.parametrize(
    ("family", "found", "requested"),
    [
        ("flux", "dev", "krea"),
        ("flux2", "klein-4b", "klein-base-4b"),
        ("z_image", "turbo", "base"),
        ("krea2", "turbo", "raw"),
        ("qwen_image", "t2i", "t2i-2512"),
        ("wan", "i2v-14b-480p-2.1", "i2v-14b-720p-2.1"),
    ],
)
def test_config_decides_between_indistinguishable_flavours(
    tiny_model: TinyModel, family: str, found: str, requested: str
) -> None:
    spec, (source, own) = spec_of(family), facts(tiny_model, family, found)
    assert own.flavour == found
    assert facts_of(config(family, flavour=requested), spec, source).flavour == requested


@pytest.mark.parametrize(
    ("family", "found", "requested"),
    [("flux", "dev", "kontext"), ("qwen_image", "edit", "t2i"), ("wan", "ti2v-5b-2.2", "t2v-14b-2.2")],
)
def test_weights_of_another_flavour(tiny_model: TinyModel, family: str, found: str, requested: str) -> None:
    source, _ = facts(tiny_model, family, found)
    with pytest.raises(ConfigError, match=rf"model\.flavour\n.*{requested}, for weights of {found}\n"):
        facts_of(config(family, flavour=requested), spec_of(family), source)


def test_boundary_needs_two_experts(tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match=r"model\.expert_boundary\n.*0\.5, for t2v-1\.3b-2\.1, which has one"):
        with_boundary(facts(tiny_model, "wan", "t2v-1.3b-2.1")[1], 0.5)


def test_prediction_override_reaches_the_sampler(tiny_model: TinyModel) -> None:
    spec, (source, own) = spec_of("sdxl"), facts(tiny_model, "sdxl", "base-1.0")
    other = facts_of(config("sdxl", {"prediction": "v_prediction"}), spec, source)
    assert (own.schedule.prediction, other.schedule.prediction) == ("epsilon", "v_prediction")
    level = torch.tensor([0.3])
    assert other.schedule.coefficients(level) == own.schedule.coefficients(level)
    request = SampleRequest("a cat", width=32, height=32, steps=2)
    generated = []
    for given in (None, own, other):
        pipeline = spec.load_pipeline(source, {}, CPU, given)
        assert pipeline.scheduler.config.prediction_type == (given or own).schedule.prediction
        generated.append(spec.sample(pipeline, request).frames[0].tobytes())
    assert generated[0] == generated[1] != generated[2]


@pytest.mark.parametrize(
    ("family", "flavour", "requested", "expected"),
    [
        ("sdxl", "base-1.0", "flow", "epsilon or v_prediction"),
        ("flux", "dev", "epsilon", "flow"),
        ("stable_audio", "open-1.0", "epsilon", "v_prediction"),
    ],
)
def test_unsupported_predictions_are_rejected(
    tiny_model: TinyModel, family: str, flavour: str, requested: Any, expected: str
) -> None:
    own = facts(tiny_model, family, flavour)[1]
    assert with_prediction(own, own.schedule.prediction) is own
    with pytest.raises(
        ConfigError, match=rf"objective\.prediction\n.*{requested}, for {flavour}.*\n.*expected  {expected}\n"
    ):
        with_prediction(own, requested)


def test_epsilon_with_zero_terminal_snr_is_rejected(tiny_v_prediction: Path) -> None:
    own = spec_of("sdxl").inspect(ModelSource("v", tiny_v_prediction))
    with pytest.raises(ConfigError, match="pure noise"):
        with_prediction(own, "epsilon")
