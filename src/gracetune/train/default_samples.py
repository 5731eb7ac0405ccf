"""Samples of a run whose config has no `validation.prompts`: captions of the dataset are the prompts.

Only `gracetune train` with a file of our own dialect asks for them (`RunOptions.default_samples`). SimpleTuner and
ai-toolkit generate no samples without prompts, and neither does a config of theirs here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gracetune.config.dataset_config import Dataset
from gracetune.config.path_status import inspect_path
from gracetune.config.run_config import RunConfig, Validation, ValidationPrompt
from gracetune.data.backend import survey
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.paths import is_hidden
from gracetune.data.captions import open_captions
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.items import bucket_of, kohya_folders
from gracetune.data.media import kind_of
from gracetune.data.media_files import examine
from gracetune.data.refs import Bucket
from gracetune.errors import ConfigError
from gracetune.models.registry import geometry
from gracetune.models.spec import ModelFacts, ModelSpec
from gracetune.train.sample_requests import requests_of

PROMPTS = 2
"""Most prompts that are taken from the captions."""
ROUNDS = 10
"""Validations in a run, besides the one before the first step."""
FEWEST_STEPS = 100
"""A shorter run is a trial: samples would take longer than its training."""
_MOST_FILES = 50
"""Files whose captions are read to find different ones."""
_IN_FILES = ("textfile", "filename", "instanceprompt")
"""Caption strategies that need no table."""


@dataclass(frozen=True)
class DefaultSamples:
    """The `validation` section with samples, or without if there can be none, and a line for the user."""

    validation: Validation
    line: str = ""


def default_samples(config: RunConfig, spec: ModelSpec, facts: ModelFacts) -> DefaultSamples:
    """Add prompts to a config that has none and leaves validation enabled, with an interval unless it has one."""
    section, training = config.validation, config.training
    is_scheduled = section.at_start or section.every_steps is not None or section.every_epochs is not None
    is_trial = training.max_steps is not None and training.max_steps < FEWEST_STEPS
    if not section.enabled or section.prompts or (is_trial and not is_scheduled):
        return DefaultSamples(section)
    dataset = next((one for one in config.datasets if _has_prompts(one)), None)
    prompts = () if dataset is None else tuple(_prompts(config, dataset, facts))
    if dataset is None or not prompts:
        return DefaultSamples(section, "no samples: no captions to use as prompts; add validation.prompts")
    changes: dict[str, object] = {"prompts": prompts}
    if not is_scheduled:
        changes["at_start"] = True
        if training.max_steps is not None:
            changes["every_steps"] = max(1, round(training.max_steps / ROUNDS))
        else:
            changes["every_epochs"] = max(1, round((training.epochs or 1) / ROUNDS))
    chosen = section.model_copy(update=changes)
    try:
        for request in requests_of(config.model_copy(update={"validation": chosen})):
            spec.check_sample(request.with_images(), facts)
    except ConfigError as error:
        return DefaultSamples(section, f"no samples: add validation.prompts; {error.problems[0].expected}")
    captions = "1 caption" if len(prompts) == 1 else f"{len(prompts)} captions"
    return DefaultSamples(chosen, f"samples {_interval(chosen)} of {captions} of {dataset.id}; --no-samples for none")


def _has_prompts(dataset: Dataset) -> bool:
    """Whether the captions of a dataset can be read before the data is staged, and a prompt alone makes a sample."""
    is_trained = dataset.dataset_type in ("image", "video", "audio") and not dataset.regularisation
    needs_images = bool(dataset.conditioning) or dataset.canny_reference is not None or dataset.video.image_to_video
    in_folder = dataset.captions.strategy in _IN_FILES and inspect_path(Path(dataset.path)).kind == "folder"
    return is_trained and in_folder and not (needs_images or dataset.disabled)


def _prompts(config: RunConfig, dataset: Dataset, facts: ModelFacts) -> Iterator[ValidationPrompt]:
    """Different captions from all over the folder, each in the shape of its file."""
    backend, seed = LocalBackend(Path(dataset.path).expanduser()), config.training.seed
    sizes = survey(backend).files
    paths = sorted(path for path in sizes if not is_hidden(path) and kind_of(path) == dataset.dataset_type)
    book, folders = open_captions(dataset.captions, backend, "captions"), kohya_folders(paths)
    shape, found = geometry(facts.family, facts.flavour), dict[str, str]()
    for path in paths[:: max(1, len(paths) // _MOST_FILES)][:_MOST_FILES]:
        folder = folders.get(path.partition("/")[0])
        try:
            caption = book.variants(book.find(path, None if folder is None else folder.name), seed)[0].strip()
        except UnreadableMediaError:
            continue  # the scan of the data reports it
        if caption:
            found.setdefault(caption, path)
    made = 0
    for caption, path in [*found.items()][:: max(1, len(found) // PROMPTS)]:
        kind = kind_of(path)
        assert kind is not None, "only media files are listed"
        file = examine(backend, path, kind, sizes[path].size)
        bucket = None if isinstance(file, str) else bucket_of(file, dataset, shape, seed)
        if isinstance(bucket, Bucket) and made < PROMPTS:
            made += 1
            yield _prompt(caption, bucket, config.validation)


def _prompt(caption: str, bucket: Bucket, section: Validation) -> ValidationPrompt:
    sized = bucket.width > 0 and section.width is None and section.height is None
    moving = bucket.frames > 1 and section.num_frames is None
    return ValidationPrompt(
        prompt=caption, width=bucket.width if sized else None, height=bucket.height if sized else None,
        num_frames=bucket.frames if moving else None,
    )  # fmt: skip


def _interval(section: Validation) -> str:
    counts = ((section.every_steps, "step"), (section.every_epochs, "epoch"))
    every = [f"every {noun}" if count == 1 else f"every {count} {noun}s" for count, noun in counts if count is not None]
    return " and ".join([*(["at the start"] if section.at_start else []), *every])
