"""What a config may say otherwise than the weights' own files. Everything else about a model is theirs to say."""

from __future__ import annotations

from dataclasses import replace

from gracetune.config.families import find_flavour
from gracetune.config.run_config import RunConfig
from gracetune.diffusion.schedule import Ddpm, Prediction
from gracetune.errors import ConfigError, Problem
from gracetune.models.registry import FOOTPRINTS, GEOMETRIES
from gracetune.models.source import ModelSource
from gracetune.models.spec import ModelFacts, ModelSpec


def facts_of(config: RunConfig, spec: ModelSpec, source: ModelSource) -> ModelFacts:
    """What the weights say, with what the config says otherwise: for training and for `ModelSpec.load_pipeline`."""
    facts = _of_flavour(spec.inspect(source), config.model.flavour)
    if config.model.expert_boundary is not None:
        facts = with_boundary(facts, config.model.expert_boundary)
    if config.objective.prediction is not None:
        facts = with_prediction(facts, config.objective.prediction)
    if config.objective.guidance is not None:
        facts = with_guidance(facts, config.objective.guidance)
    return facts


def _of_flavour(facts: ModelFacts, asked: str | None) -> ModelFacts:
    """The flavour's name is what data and memory are planned by: another one's plan would be for another model.

    Flavours that differ in the values of their weights alone cannot be told apart by files: there the config is right.
    """
    if asked is None or asked == facts.flavour:
        return facts
    if _plan(facts.family, asked) != _plan(facts.family, facts.flavour):
        hint = f"--set model.flavour={facts.flavour}, or give the weights of {asked} as model.path"
        raise ConfigError([Problem("model.flavour", f"{asked}, for weights of {facts.flavour}", facts.flavour, hint)])
    return replace(facts, flavour=asked)


def _plan(family: str, flavour: str) -> tuple[object, ...]:
    footprint = next(one for one in FOOTPRINTS[family] if one.flavour == flavour)
    known = find_flavour(family, flavour)
    assert known is not None
    return replace(footprint, flavour="", measured=""), GEOMETRIES[family][flavour], replace(known, name="", weights="")


def with_boundary(facts: ModelFacts, boundary: float) -> ModelFacts:
    """The two experts meet at this noise level."""
    if len(facts.experts) != 2:
        found = f"{boundary:g}, for {facts.flavour}, which has one denoiser"
        raise ConfigError([Problem("model.expert_boundary", found, "no value", "remove model.expert_boundary")])
    high, low = facts.experts
    return replace(facts, experts=(replace(high, lowest=boundary), replace(low, highest=boundary)))


def with_guidance(facts: ModelFacts, guidance: float) -> ModelFacts:
    """What a guidance input is given while the model learns. A model without one stays as it is (`guidance_note`)."""
    if facts.details.get("guidance") is None:
        return facts
    return replace(facts, details={**facts.details, "guidance": guidance})


def guidance_note(config: RunConfig, facts: ModelFacts) -> str | None:
    if config.objective.guidance is None or facts.details.get("guidance") is not None:
        return None
    return f"objective.guidance: no effect, {facts.flavour} has no guidance input"


def with_prediction(facts: ModelFacts, prediction: Prediction) -> ModelFacts:
    """The denoiser is asked for something else than its files say: weights whose scheduler's file was never mended."""
    schedule = facts.schedule
    if prediction == schedule.prediction:
        return facts
    if not isinstance(schedule, Ddpm) or prediction == "flow":
        found = f"{prediction}, for {facts.flavour}, which answers with {schedule.prediction}"
        expected = "epsilon or v_prediction" if isinstance(schedule, Ddpm) else schedule.prediction
        raise ConfigError([Problem("objective.prediction", found, expected, "remove objective.prediction")])
    if prediction == "epsilon" and schedule.alphas_cumprod[-1] == 0:
        found = "epsilon, for a noise schedule that ends in pure noise, which says nothing about the picture"
        raise ConfigError([Problem("objective.prediction", found, "v_prediction", "remove objective.prediction")])
    return replace(facts, schedule=replace(schedule, prediction=prediction))
