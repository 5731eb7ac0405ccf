"""Propose a config: the values of a preset, fitted to the contents of a folder and the memory of a machine."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gracetune.config.base import file_name
from gracetune.config.draft import parse_path
from gracetune.config.run_config import RunConfig
from gracetune.config.yaml_syntax import parse_yaml
from gracetune.data.buckets import UnfitFile
from gracetune.data.captions import with_trigger
from gracetune.data.geometry import Geometry
from gracetune.data.items import bucket_of
from gracetune.data.refs import Bucket
from gracetune.errors import ConfigError, Problem
from gracetune.hardware import Machine
from gracetune.models.registry import footprint_of, geometry
from gracetune.planning.config_demand import demand_of
from gracetune.planning.memory_tiers import free_on_disk
from gracetune.planning.plan import Plan, plan
from gracetune.proposal.contents import FolderContents
from gracetune.proposal.models import ChosenModel, model_named
from gracetune.proposal.presets import TrainingPreset, presets_for

PROMPTS = 4
"""Number of captions used as validation prompts."""
ROUNDS = 10
"""Validations in a run, besides the one before the first step."""
_CHECKPOINTS = 5
"""Checkpoints in a run."""
_FEWEST_TO_SPLIT, _HELD_OUT, _MOST_HELD_OUT = 10, 0.08, 16
"""Smallest dataset that is split, share of files that is held out, and the most files held out."""

Values = dict[str, Any]
Comments = dict[tuple[str | int, ...], str]


@dataclass(frozen=True)
class Answers:
    """The user's answers, or the defaults."""

    name: str
    """Name of the run and of its files."""
    model: ChosenModel
    preset: TrainingPreset
    trigger: str | None
    steps: int | None = None


@dataclass(frozen=True)
class Proposal:
    values: Values
    """Config sections in our dialect, without defaults."""
    comments: Comments
    """The reason for a value, by its path."""
    config: RunConfig
    plan: Plan
    mismatch: str | None = None
    """Why the plan does not apply to the weights in the model's folder. None if it applies."""

    @property
    def is_rejected(self) -> bool:
        """Whether `gracetune train` would reject the config, because it does not fit."""
        return self.mismatch is None and self.plan.verdict not in ("fits", "unknown")


def default_preset(contents: FolderContents) -> TrainingPreset:
    return presets_for(contents.media)[0]


def default_trigger(contents: FolderContents) -> str | None:
    """The folder's name for datasets without captions, which need a trigger word; None with captions."""
    return None if contents.captions else slug(contents.folder.name)


def default_model(contents: FolderContents, preset: TrainingPreset, machine: Machine) -> ChosenModel:
    """The first of the preset's models that fits, or its first model if none does."""
    models = [model_named(name) for name in preset.models]
    for model in models:
        if propose(contents, Answers(slug(contents.folder.name), model, preset, None), machine).plan.verdict == "fits":
            return model
    return models[0]


def slug(name: str) -> str:
    """A folder's name as one word that is safe in file names."""
    return file_name("-".join(name.split())) or "my-run"


def check_answers(contents: FolderContents, answers: Answers) -> None:
    """Raise one ConfigError that lists every answer that does not suit the folder."""
    problems = []
    media, model, preset = contents.media, answers.model, answers.preset
    if preset.media != media:
        known = ", ".join(one.name for one in presets_for(media))
        problems.append(
            Problem(
                "--preset", f"{preset.name}, for {_words(contents)}", known, f"--preset {presets_for(media)[0].name}"
            )
        )
    if media == "edit" and not model.flavour.edits:
        expected = f"a model that edits: {', '.join(presets_for('edit')[0].models)}"
        hint = f"--model {presets_for('edit')[0].models[0]}; or train on {contents.trained} alone"
        problems.append(Problem("--model", f"{model.name}, for edit pairs", expected, hint))
    elif model.flavour.edits and not model.flavour.images_alone and media != "edit":
        expected = "a folder of the images before the edit and one of those after it, with the same file names"
        hint = "name the two folders before/ and after/, or choose a model that does not edit"
        problems.append(Problem("--model", f"{model.name}, for {_words(contents)}", expected, hint))
    elif media != "edit" and media not in _LEARNS_FROM[model.flavour.makes]:
        models = presets_for(media)[0].models
        expected = f"a model that learns from them: {', '.join(models)}"
        problems.append(Problem("--model", f"{model.name}, for {_words(contents)}", expected, f"--model {models[0]}"))
    if problems:
        raise ConfigError(problems)


_LEARNS_FROM = {"image": ("image",), "video": ("video", "image"), "audio": ("audio",)}


def _words(contents: FolderContents) -> str:
    return {"image": "images", "video": "clips", "audio": "sounds", "edit": "edit pairs"}[contents.media]


def propose(contents: FolderContents, answers: Answers, machine: Machine) -> Proposal:
    """Propose the first combination of micro-batch and base precision that fits the machine, else what the plan of the
    smallest one changes. If the plan does not apply to the weights, propose the first combination."""
    check_answers(contents, answers)
    values, comments = _values(contents, answers, machine)
    _add_validation(values, comments, contents, answers)
    found = None
    for candidate, why in _candidates(values, machine):
        found = _with_plan(candidate, {**comments, **why}, answers.model, machine)
        if not found.is_rejected:
            return found
    assert found is not None
    if found.plan.verdict == "does not fit":
        return found
    changed, why = _with_changes(found)
    return _with_plan(changed, {**found.comments, **why}, answers.model, machine)


def _with_plan(values: Values, comments: Comments, model: ChosenModel, machine: Machine) -> Proposal:
    config = RunConfig.model_validate(copy.deepcopy(values))
    demand, _ = demand_of(config, machine, None)
    result = plan(demand, machine, disk_free=free_on_disk(config.output_dir))
    footprint, _ = footprint_of(config.model)
    mismatch = None if model.parameters is None else footprint.mismatch(model.parameters)
    return Proposal(values, comments, config, result, mismatch)


def _with_changes(proposal: Proposal) -> tuple[Values, Comments]:
    """The values with the edits that the plan asks for, each with its reason."""
    values, comments = copy.deepcopy(proposal.values), {}
    for change in proposal.plan.changes:
        if not change.automatic:
            path = parse_path(change.key)
            _put(values, [str(step) for step in path], parse_yaml(change.after))
            comments[path[:1]] = f"so that it fits: {change.why}"
    return values, comments


def _candidates(values: Values, machine: Machine) -> Iterator[tuple[Values, Comments]]:
    """The values unchanged, then with smaller micro-batches, then with int8 base weights.

    On a CPU the values in fp32 come first.
    """
    on_cpu = machine.profile.value == "cpu"
    if on_cpu:
        fp32 = copy.deepcopy(values)
        fp32["model"]["base_precision"] = fp32["training"]["mixed_precision"] = "fp32"
        yield fp32, {("model",): "no GPU here: CPUs compute fastest in fp32"}
    yield values, {}
    batch = values["training"]["batch_size"]
    halved = copy.deepcopy(values)
    while batch > 1 and batch % 2 == 0:
        batch //= 2
        halved["training"] |= {
            "batch_size": batch,
            "gradient_accumulation_steps": values["training"]["batch_size"] // batch,
        }
        yield copy.deepcopy(halved), {("training",): "smaller micro-batches, so that it fits"}
    if not on_cpu:
        halved["model"]["base_precision"] = "int8"
        yield halved, {("model",): "the frozen weights in int8, so that it fits"}


def _values(contents: FolderContents, answers: Answers, machine: Machine) -> tuple[Values, Comments]:
    model, preset = answers.model, answers.preset
    name, files = answers.name, len(contents.files)
    shape = geometry(model.family, model.flavour.name)
    dataset: Values = {"id": name, "path": str(contents.trained)}
    if contents.media in ("video", "audio"):
        dataset["dataset_type"] = contents.media
    values: Values = {
        "name": name, "output_dir": f"output/{name}", "model": model.values, "datasets": [dataset],
        "adapter": {"kind": "lora"}, "optimizer": {"name": "adamw"}, "objective": {}, "training": {},
    }  # fmt: skip
    comments: Comments = {
        ("output_dir",): "the adapter, samples, report.html",
        ("datasets", 0, "path"): contents.summary,
    }
    for key, option in preset.options_of(model.family, model.flavour.name).items():
        place = parse_path(key)
        _put(
            dataset if place[0] == "dataset" else values, [str(one) for one in place if one != "dataset"], option.value
        )
    _fit_to_files(dataset, comments, contents, shape)
    steps = answers.steps or preset.steps.of(files)
    values["training"] = {"max_steps": steps, **values["training"]}
    seen = round(steps * values["training"].get("batch_size", 1) / files)
    times = {0: "less than once", 1: "about once"}.get(seen, f"about {seen} times")
    comments["training",] = f"each file is seen {times}"
    if answers.trigger:
        dataset.setdefault("captions", {})["trigger_word"] = answers.trigger
        comments["datasets", 0, "captions"] = f"{answers.trigger} is added to captions without it"
    if files >= _FEWEST_TO_SPLIT:
        dataset["held_out"] = min(_MOST_HELD_OUT, max(1, round(files * _HELD_OUT)))
        comments["datasets", 0, "held_out"] = "never trained on: the loss on them shows overfitting"
    if contents.before is not None:
        dataset["conditioning"] = ["before"]
        before = {"id": "before", "path": str(contents.before), "dataset_type": "conditioning"}
        before |= {"conditioning_type": "reference_loose", "resolution": dataset["resolution"]}
        values["datasets"].append(before)
    values["checkpoints"] = {"every_steps": max(1, steps // _CHECKPOINTS), **values.get("checkpoints", {})}
    return {key: value for key, value in values.items() if value != {}}, comments


def _fit_to_files(dataset: Values, comments: Comments, contents: FolderContents, shape: Geometry) -> None:
    """Lower resolution and frame count, so that no image is upscaled and no clip is too short."""
    if contents.media == "audio":
        dataset.pop("resolution", None)
        return
    side, wanted = contents.median_side, dataset["resolution"]
    unit = max(64, shape.side_multiple)
    if side < wanted:
        dataset["resolution"] = max(unit, int(side) // unit * unit)
        comments["datasets", 0, "resolution"] = f"typical files are about {side:.0f} pixels square; usual is {wanted:g}"
    if contents.clips:
        video = dataset.setdefault("video", {})
        rate = shape.default_fps
        counts = sorted(clip.frames if rate is None else max(1, int(clip.duration * rate)) for clip in contents.clips)
        shortest = min(video["num_frames"], counts[0])
        video["num_frames"] = (shortest - 1) // shape.frame_step * shape.frame_step + 1
        if rate is not None:
            video["fps"] = rate
    else:
        dataset.pop("video", None)


def _add_validation(values: Values, comments: Comments, contents: FolderContents, answers: Answers) -> None:
    every = max(1, values["training"]["max_steps"] // ROUNDS)
    section: Values = {"every_steps": every, "at_start": True}
    if "held_out" in values["datasets"][0]:
        section["loss_every_steps"] = every
    section |= _sample_shape(values, contents, answers.model)
    section["prompts"] = _prompts(contents, answers)
    if not section["prompts"]:
        section = {key: value for key, value in section.items() if key == "loss_every_steps"}
        comments["validation",] = f"no samples: {answers.model.name} starts from an image, add prompts with references"
    else:
        comments["validation", "every_steps"] = f"samples {ROUNDS} times a run, and before the first step"
        comments["validation", "prompts"] = "captions of the dataset; write your own"
    if section:
        values["validation"] = section
    values["checkpoints"] = values.pop("checkpoints")  # keep it as the last section


def _prompts(contents: FolderContents, answers: Answers) -> list[Values]:
    if answers.model.flavour.from_image:
        return []
    if not contents.captions:
        return [{"prompt": answers.trigger or ""}]
    first_of: dict[str, str] = {}
    for path, caption in contents.captions.items():
        first_of.setdefault(caption.splitlines()[0], path)
    spread = [*first_of][:: max(1, len(first_of) // PROMPTS)][:PROMPTS]
    prompts: list[Values] = []
    for caption in spread:
        prompt: Values = {"prompt": with_trigger(caption, answers.trigger, add=True)}
        if contents.before is not None:
            source = next(iter(sorted(contents.before.glob(f"{first_of[caption].rpartition('.')[0]}.*"))), None)
            if source is None:
                continue
            prompt["references"] = [str(source)]
        prompts.append(prompt)
    return prompts


def _sample_shape(values: Values, contents: FolderContents, model: ChosenModel) -> Values:
    """The shape of the most common bucket."""
    if contents.media == "audio":
        return {}
    config = RunConfig.model_validate({**copy.deepcopy(values), "validation": {}})
    shape = geometry(model.family, model.flavour.name)
    found = [bucket_of(one, config.datasets[0], shape, config.training.seed) for one in contents.files]
    buckets = Counter(one for one in found if isinstance(one, Bucket))
    if not buckets:
        first = next(one for one in found if isinstance(one, UnfitFile))
        lost = f"{len(found)} files, all {first.reason}: {first.detail}"
        problem = Problem("FOLDER", lost, "files the model can learn from", "use larger or longer files")
        raise ConfigError([problem])
    bucket = buckets.most_common(1)[0][0]
    frames = {"num_frames": bucket.frames} if bucket.frames > 1 else {}
    return {"width": bucket.width, "height": bucket.height, **frames}


def _put(tree: Values, path: list[str], value: Any) -> None:
    """Set a value in nested dicts, creating them on the way."""
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value
