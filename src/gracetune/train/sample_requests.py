"""The samples a config asks for: what each of them is, and whether it can be drawn at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from gracetune.config.run_config import RunConfig, ValidationPrompt
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.media.image import open_rgb
from gracetune.errors import ConfigError, Problem
from gracetune.models.spec import ModelFacts, ModelSpec, SampleRequest

DEFAULT_STEPS = 20


@dataclass(frozen=True)
class ValidationRequest:
    """One sample: what is drawn, and how strongly the adapter counts."""

    prompt: int
    """Its place in `validation.prompts`."""
    request: SampleRequest
    strength: float
    references: tuple[str, ...]

    def with_images(self) -> SampleRequest:
        """ConfigError where one of them is no picture (any more). They are seen as those of a dataset are."""
        return replace(self.request, references=tuple(_opened(name) for name in self.references))


def requests_of(config: RunConfig) -> list[ValidationRequest]:
    """Every sample of one round. Pure: the reference pictures are opened when they are needed."""
    section = config.validation
    found = []
    for number, prompt in enumerate(section.prompts if section.enabled else ()):
        seed = next(one for one in (prompt.seed, section.seed, config.training.seed) if one is not None)
        for copy in range(section.images_per_prompt):
            walked = seed + (number if section.walk_seed else 0) + copy
            found.append(
                ValidationRequest(number, _request(config, prompt, walked), prompt.adapter_strength, prompt.references)
            )
    return found


def check_requests(config: RunConfig, spec: ModelSpec, facts: ModelFacts, warn: Callable[[str], None]) -> None:
    """ConfigError for samples that could not be drawn: said before the first step, not at the first validation.

    Where they are drawn on request alone, which may never come, it is a warning.
    """
    if config.validation.guidance_rescale and not spec.rescales_guidance:
        warn(f"validation.guidance_rescale is not used: the pipeline of {spec.family} has no such option")
    one_of_each = {request.prompt: request for request in requests_of(config)}  # the others differ in their seed alone
    problems = [problem for request in one_of_each.values() for problem in _problems(request, config, spec, facts)]
    section = config.validation
    if problems and (section.at_start or section.every_steps or section.every_epochs):
        raise ConfigError(dict.fromkeys(problems))
    for problem in dict.fromkeys(problems):
        warn(f"samples cannot be drawn as they are asked for: {problem}")


def _problems(request: ValidationRequest, config: RunConfig, spec: ModelSpec, facts: ModelFacts) -> Iterator[Problem]:
    try:
        spec.check_sample(request.with_images(), facts)
    except ConfigError as error:
        for problem in error.problems:
            yield replace(problem, key=_config_key(problem.key, request.prompt, config))


def _config_key(name: str, number: int, config: RunConfig) -> str:
    """The key to change: the prompt's own, or the section's where the prompt leaves it to that."""
    own = config.validation.prompts[number].model_dump()
    if name in own and own[name] is None:
        return f"validation.{name}"
    return f"validation.prompts[{number}].{name}"


def _request(config: RunConfig, prompt: ValidationPrompt, seed: int) -> SampleRequest:
    section = config.validation
    negative = section.negative_prompt if prompt.negative_prompt is None else prompt.negative_prompt
    return SampleRequest(
        prompt=prompt.prompt,
        negative_prompt=negative,
        width=prompt.width or section.width or 0,
        height=prompt.height or section.height or 0,
        frames=prompt.num_frames or section.num_frames or 1,
        steps=prompt.steps or section.steps or DEFAULT_STEPS,
        guidance=section.guidance if prompt.guidance is None else prompt.guidance,
        guidance_rescale=section.guidance_rescale,
        seed=seed,
    )


def _opened(name: str) -> Image.Image:
    try:
        return open_rgb(Path(name).expanduser().read_bytes(), name)
    except UnreadableMediaError as error:
        found = f"{name}: {error.reason}"
    except OSError as error:
        found = f"{name}: {error.strerror or error}"
    raise ConfigError([Problem("references", found, "a picture", "name another file, or save this one as PNG")])
