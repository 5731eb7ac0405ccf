"""Model facts with a config's overrides. Whatever a config does not override comes from the weights' own files."""

from __future__ import annotations

from dataclasses import replace

from gracetune.config.families import find_flavour, flavours
from gracetune.config.rules import distilled_problem
from gracetune.config.run_config import RunConfig
from gracetune.config.spelling import nearest
from gracetune.diffusion.schedule import Ddpm, Prediction
from gracetune.errors import ConfigError, Problem
from gracetune.models.registry import FOOTPRINTS, GEOMETRIES
from gracetune.models.source import ModelSource
from gracetune.models.spec import ModelFacts, ModelSpec


def facts_of(config: RunConfig, spec: ModelSpec, source: ModelSource) -> ModelFacts:
    """The facts of the weights with the config's overrides. Training and `ModelSpec.load_pipeline` get the same facts.

    Raises ConfigError for an override that these weights do not support.
    """
    facts = _with_flavour(spec.inspect(source), config.model.flavour)
    if config.model.expert_boundary is not None:
        facts = with_boundary(facts, config.model.expert_boundary)
    if config.objective.prediction is not None:
        facts = with_prediction(facts, config.objective.prediction)
    if config.objective.guidance is not None:
        facts = with_guidance(facts, config.objective.guidance)
    return facts


def _with_flavour(facts: ModelFacts, flavour: str | None) -> ModelFacts:
    """The facts under the config's flavour; an error if the files show another one.

    Data and memory are planned by the flavour's name, so a wrong name would plan for another model. Flavours that
    differ only in the values of their weights cannot be told apart by their files; for these the config decides.
    """
    if flavour is None or flavour == facts.flavour:
        return facts
    if _planning_data(facts.family, flavour) != _planning_data(facts.family, facts.flavour):
        hint = f"--set model.flavour={facts.flavour}, or give the weights of {flavour} as model.path"
        raise ConfigError([Problem("model.flavour", f"{flavour}, for weights of {facts.flavour}", facts.flavour, hint)])
    return replace(facts, flavour=flavour)


def _planning_data(family: str, flavour: str) -> tuple[object, ...]:
    """Everything that the planning of data and memory depends on. Flavours with equal data are interchangeable here."""
    footprint = next(one for one in FOOTPRINTS[family] if one.flavour == flavour)
    names = find_flavour(family, flavour)
    assert names is not None
    alike = replace(names, name="", weights="", distilled=False)
    return replace(footprint, flavour="", measured=""), GEOMETRIES[family][flavour], alike


def check_distilled(config: RunConfig, spec: ModelSpec, source: ModelSource, facts: ModelFacts) -> str | None:
    """Reject weights that were distilled to few steps, unless they are trained with an assistant adapter.

    Returns a warning if the files show such weights and the config names a flavour that is not distilled.
    """
    flavour, shown = (find_flavour(facts.family, name) for name in (facts.flavour, spec.inspect(source).flavour))
    assert flavour is not None
    broken = distilled_problem(config, flavour)
    if broken is not None:
        others = [one.name for one in flavours(facts.family) if not one.distilled]
        likely = nearest(flavour.name, others)  # klein-base-9b for klein-9b
        chosen = others[:1] if likely is None else [likely]
        otherwise = (f"; if they are not distilled, --set model.flavour={one}" for one in chosen)
        hint = "".join([broken.hint, *otherwise])
        raise ConfigError([Problem(".".join(map(str, broken.path)), broken.found, broken.expected, hint)])
    if shown is None or flavour.distilled or not shown.distilled:
        return None
    return (
        f"model.flavour: {flavour.name}, but the files are those of {shown.name}, which is distilled to few sampling "
        "steps: they are trained as they are. Correct for weights whose distillation was undone, wrong for all others"
    )


def with_boundary(facts: ModelFacts, boundary: float) -> ModelFacts:
    """The facts of a two-expert model with this noise level as the boundary between the experts."""
    if len(facts.experts) != 2:
        found = f"{boundary:g}, for {facts.flavour}, which has one denoiser"
        raise ConfigError([Problem("model.expert_boundary", found, "no value", "remove model.expert_boundary")])
    high, low = facts.experts
    return replace(facts, experts=(replace(high, lowest=boundary), replace(low, highest=boundary)))


def with_guidance(facts: ModelFacts, guidance: float) -> ModelFacts:
    """The facts with another value for the model's guidance input. Unchanged if the model has no such input, in which
    case `guidance_note` informs the user."""
    if facts.details.get("guidance") is None:
        return facts
    return replace(facts, details={**facts.details, "guidance": guidance})


def guidance_note(config: RunConfig, facts: ModelFacts) -> str | None:
    """A note if `objective.guidance` has no effect; None if it has one or is not set."""
    if config.objective.guidance is None or facts.details.get("guidance") is not None:
        return None
    return f"objective.guidance: no effect: {facts.flavour} has no guidance input"


def with_prediction(facts: ModelFacts, prediction: Prediction) -> ModelFacts:
    """The facts with another prediction type, for weights whose published scheduler config is wrong."""
    schedule = facts.schedule
    if prediction == schedule.prediction:
        return facts
    if not isinstance(schedule, Ddpm) or prediction == "flow":
        found = f"{prediction}, for {facts.flavour}, which predicts {schedule.prediction}"
        expected = "epsilon or v_prediction" if isinstance(schedule, Ddpm) else schedule.prediction
        raise ConfigError([Problem("objective.prediction", found, expected, "remove objective.prediction")])
    if prediction == "epsilon" and schedule.alphas_cumprod[-1] == 0:
        found = "epsilon, for a noise schedule that ends in pure noise, which says nothing about the image"
        raise ConfigError([Problem("objective.prediction", found, "v_prediction", "remove objective.prediction")])
    return replace(facts, schedule=replace(schedule, prediction=prediction))
