"""The samples that a config requests, and checks that they can be generated."""

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
class ConfiguredSample:
    """One sample to generate."""

    prompt: int
    """Index in `validation.prompts`."""
    request: SampleRequest
    strength: float
    """Strength of the adapter."""
    references: tuple[str, ...]
    """Paths of reference images."""

    def with_images(self) -> SampleRequest:
        """The request with its reference images, decoded like a dataset's. ConfigError if one cannot be read."""
        return replace(self.request, references=tuple(_opened(name) for name in self.references))


def requests_of(config: RunConfig) -> list[ConfiguredSample]:
    """Every sample of one validation. Reads no files: reference images are opened when they are needed."""
    section = config.validation
    found = []
    for number, prompt in enumerate(section.prompts if section.enabled else ()):
        seed = next(one for one in (prompt.seed, section.seed, config.training.seed) if one is not None)
        for copy in range(section.images_per_prompt):
            walked = seed + (number if section.walk_seed else 0) + copy
            found.append(
                ConfiguredSample(number, _request(config, prompt, walked), prompt.adapter_strength, prompt.references)
            )
    return found


def check_requests(config: RunConfig, spec: ModelSpec, facts: ModelFacts, warn: Callable[[str], None]) -> None:
    """Check before the first step that all samples can be generated.

    A sample that cannot is an error, or a warning if validation runs on request only.
    """
    if config.validation.guidance_rescale and not spec.rescales_guidance:
        warn(f"validation.guidance_rescale is not used: the pipeline of {spec.family} has no such option")
    one_of_each = {request.prompt: request for request in requests_of(config)}  # others differ only in their seed
    problems = [problem for request in one_of_each.values() for problem in _problems(request, config, spec, facts)]
    section = config.validation
    if problems and (section.at_start or section.every_steps or section.every_epochs):
        raise ConfigError(dict.fromkeys(problems))
    for problem in dict.fromkeys(problems):
        warn(f"samples cannot be generated as requested: {problem}")


def _problems(request: ConfiguredSample, config: RunConfig, spec: ModelSpec, facts: ModelFacts) -> Iterator[Problem]:
    try:
        spec.check_sample(request.with_images(), facts)
    except ConfigError as error:
        for problem in error.problems:
            yield replace(problem, key=_config_key(problem.key, request.prompt, config))


def _config_key(name: str, number: int, config: RunConfig) -> str:
    """The config key that sets this value: the prompt's own, or the section's if the prompt does not set it."""
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
    raise ConfigError([Problem("references", found, "an image", "name another file, or save this one as PNG")])
