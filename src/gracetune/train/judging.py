"""Measure how well a run knows each of its images: `gracetune data judge`.

The loss of every image is measured with the weights that the run began with and with those of its last checkpoint, at
the noise and the noise levels of the held-out loss. The run's own config, caches and model loading are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from gracetune.cache.batches import Batch
from gracetune.config.environment import Environment
from gracetune.config.run_config import Checkpoints, Logging, RunConfig, Validation
from gracetune.data.contact_sheet import thumbnails
from gracetune.data.copies.local import Copies
from gracetune.data.errors import UnreadableMediaError
from gracetune.data.index import DataIndex, freshness
from gracetune.data.refs import SampleRef
from gracetune.errors import ConfigError, Problem
from gracetune.hub.access import HubAccess
from gracetune.models.registry import geometry
from gracetune.seeded_random import torch_seed
from gracetune.storage.atomic import replacing
from gracetune.train.assembly import build_initial_state, cache_resources, open_host, open_memory
from gracetune.train.data import CachedData, fetch, fill_caches, stage_data
from gracetune.train.finish import remove_recorded_entries
from gracetune.train.held_out import MOST, batch_of, fixed_refs, held_out_refs, losses_by_sample
from gracetune.train.job import EvaluatedModel
from gracetune.train.judgement import DataFinding, JudgedSample, Judgement, find_all
from gracetune.train.planning import choose, shapes_of
from gracetune.train.preflight import Preflight, RunOptions, preflight
from gracetune.train.resume import restore, saved_epoch
from gracetune.train.state_parts import CheckpointSource
from gracetune.train.step import TrainStep
from gracetune.train.trained_model import load_trained_model, router_of
from gracetune.train.view import View

SHOWN = 12
"""Findings of each kind that get a thumbnail."""
_SIDE = 8
"""Images are compared by their latents, reduced to this size."""


def judge_run(
    config: RunConfig, *, environment: Environment, view: View, most: int, thumbnail_folder: Path
) -> tuple[Judgement, dict[int, str]]:
    """Judge at most `most` images of a run. Returns the judgement, and the file names of thumbnails by image index.

    The run's folder is changed by the thumbnails only, and by cache entries if some are missing.
    """
    config = _quiet(config)
    with ExitStack() as stack:
        options = RunOptions(resume="latest", dry_run=True, allow_other_data=True)
        ready = preflight(config, environment=environment, options=options, view=view, stack=stack)
        if ready.start.checkpoint is None:
            found = "no checkpoint: the run saved nothing"
            hint = "train longer, or with a smaller checkpoints.every_steps"
            raise ConfigError([Problem("RUN", found, "a run with a checkpoint", hint, str(ready.folder.path))])
        loaded = _load(ready, view, stack)
        judgement, refs = _judge(loaded, view, most)
        names = _write_thumbnails(loaded.cached.index, refs, judgement.findings, thumbnail_folder)
    remove_recorded_entries(config, view)  # of a run whose caches do not persist
    return judgement, names


def _quiet(config: RunConfig) -> RunConfig:
    """The config without trackers, samples and uploads, which judging does not need."""
    keep = Checkpoints.model_validate(config.checkpoints.model_dump() | {"push_to_hub": None})
    quiet = Logging(every_steps=config.logging.every_steps, trackers=())
    return config.model_copy(update={"logging": quiet, "validation": Validation(), "checkpoints": keep})


@dataclass(frozen=True, eq=False)
class _LoadedForJudging:
    model: EvaluatedModel
    """With the weights that the run began with, until `restore` is called."""
    cached: CachedData
    ready: Preflight
    saved: CheckpointSource
    steps: int
    """Length of the whole run."""

    def restore(self) -> None:
        """Load the last checkpoint. The run's folder is left as it is."""
        restore(
            self.saved, self.ready.start, self.ready.folder, rates=None, runtime=self.ready.runtime, steps=self.steps,
            dry_run=True,
        )  # fmt: skip


def _load(ready: Preflight, view: View, stack: ExitStack) -> _LoadedForJudging:
    """Load what `train.load` loads, in the same order, without what only a training step needs."""
    config, runtime, machine, model, planned = ready.config, ready.runtime, ready.machine, ready.model, ready.planned
    memory = open_memory(
        config, machine, runtime, ready.environment, view, stack,
        managed_elsewhere=planned.managed_bytes, force_oversubscription=False,
    )  # fmt: skip
    resources = cache_resources(config, machine, runtime, ready.environment, memory, view)
    local = fetch(Copies(config, HubAccess.of(ready.environment)), runtime, view)
    index = stage_data(local, geometry(model.facts.family, model.facts.flavour), machine, runtime, view, stack)
    epoch = saved_epoch(ready.start)
    cached = fill_caches(config, index, model.encoders, runtime, resources, view, stack, epoch=epoch)
    choices, _ = choose(
        config, planned, model.spec.attention, runtime.device, model.encoders.placement.dtype,
        shapes=shapes_of(cached.index),
    )  # fmt: skip
    host = open_host(config, planned, machine, runtime, memory, model.facts)
    with view.phase("loading the model"):
        trained_model = load_trained_model(
            config, model.spec, model.source, model.facts, runtime, choices, host, model.assistant
        )
    initial = build_initial_state(config, trained_model, cached.index, runtime, view)
    denoiser = host.module(trained_model.trained[0])
    step = TrainStep(
        model.spec, model.facts, initial.goal, seed=config.training.seed, dtype=trained_model.dtype,
        autocast=runtime.autocast, router=router_of(config, model.spec, model.facts, denoiser),
    )  # fmt: skip
    evaluated = EvaluatedModel(runtime, trained_model, step, initial.state)
    saved = CheckpointSource(config, trained_model, initial.state, allow_other_data=True)
    return _LoadedForJudging(evaluated, cached, ready, saved, initial.length.steps)


def _judge(loaded: _LoadedForJudging, view: View, most: int) -> tuple[Judgement, list[SampleRef]]:
    """The judgement, and the judged samples in the order of `Judgement.samples`."""
    index, notes = loaded.cached.index, list[str]()
    cached = []
    for one in index.datasets:
        if freshness(one.dataset) == "once" and not one.dataset.regularisation:
            cached.append(one)
        else:
            why = "regularisation data" if one.dataset.regularisation else "encoded anew for each visit or epoch"
            notes.append(f"dataset {one.id} is not judged: it is {why}")
    every = fixed_refs(index, cached)
    if not every:
        problem = Problem("datasets", "no image that can be judged: " + "; ".join(notes), "cached images",
                          "train with cached latents")  # fmt: skip
        raise ConfigError([problem])
    refs = every[:: -(-len(every) // most)]
    if len(refs) < len(every):
        notes.append(f"{len(refs)} of {len(every)} images are judged, evenly chosen; --most N judges more")
    others = _with_other_captions(refs)
    if loaded.cached.keys.reads_images or others is None:
        why = "depend on the images" if others is not None else "are all equal"
        notes.append(f"captions are not compared with each other, because they {why}")
        others = None
    held_out = held_out_refs(index)[:MOST]
    with view.phase(f"{len(refs)} images, before training"):
        first, held_first = _losses(loaded, refs), _losses(loaded, held_out)
    loaded.restore()
    with view.phase(f"{len(refs)} images, after training"):
        last, held_last = _losses(loaded, refs), _losses(loaded, held_out)
    swapped = [None] * len(refs) if others is None else _losses(loaded, others)
    samples = tuple(
        JudgedSample(ref.dataset, ref.path, ref.digest, ref.caption.text, before, after, other, _enlarged(ref))
        for ref, before, after, other in zip(refs, first, last, swapped, strict=True)
    )
    looks = [_look(batch.tensors["latents"]) for batch in _Batches(loaded, refs)]
    both = (sum(held_first) / len(held_out), sum(held_last) / len(held_out)) if held_out else None
    step = loaded.model.state.position.step
    return Judgement(step, samples, find_all(samples, looks), both, tuple(notes)), refs


def _with_other_captions(refs: Sequence[SampleRef]) -> list[SampleRef] | None:
    """Each sample with the next caption that differs from its own; None if there is only one caption."""
    found = []
    for number, ref in enumerate(refs):
        later = (other.caption for other in (*refs[number + 1 :], *refs[:number]))
        caption = next((one for one in later if one.text != ref.caption.text), None)
        if caption is None:
            return None
        found.append(replace(ref, caption=caption))
    return found


@dataclass(frozen=True, eq=False)
class _Batches:
    """Batches of one sample, read from the caches at every iteration."""

    loaded: _LoadedForJudging
    refs: Sequence[SampleRef]

    def __iter__(self) -> Iterator[Batch]:
        cached, device = self.loaded.cached, self.loaded.model.device
        for number, ref in enumerate(self.refs):
            yield batch_of(ref, number, cached.latents, cached.texts, cached.keys, device)


def _losses(loaded: _LoadedForJudging, refs: Sequence[SampleRef]) -> list[float]:
    """The loss of each sample: the mean over noise levels and experts."""
    if not refs:
        return []
    seed = torch_seed(loaded.saved.config.training.seed, "held out")
    by_expert = losses_by_sample(loaded.model, _Batches(loaded, refs), seed)
    losses: list[float] = torch.stack([each.mean(1) for each in by_expert.values()]).mean(0).tolist()
    return losses


def _look(latents: Tensor) -> Tensor:
    """A unit vector of the reduced latents of an image, clip or sound, on the CPU. [1, C, (F,) H, W] or [1, C, L]"""
    values = latents.float()
    if values.dim() == 3:
        reduced = functional.adaptive_avg_pool1d(values, _SIDE * _SIDE)
    else:
        reduced = functional.adaptive_avg_pool2d(values.mean(2) if values.dim() == 5 else values, _SIDE)
    channels = reduced[0].flatten(1)
    return functional.normalize((channels - channels.mean(1, keepdim=True)).flatten(), dim=0).cpu()


def _enlarged(ref: SampleRef) -> float | None:
    """The factor by which the image is scaled up; None for audio."""
    if ref.fit is None:
        return None
    return max(new / old for new, old in zip(ref.fit.resized, ref.fit.original, strict=True))


def _write_thumbnails(
    index: DataIndex, refs: Sequence[SampleRef], findings: Sequence[DataFinding], folder: Path
) -> dict[int, str]:
    """Write a thumbnail of the first findings of each kind. Returns the file names by the image's index."""
    shown: dict[int, None] = {}
    for kind in dict.fromkeys(one.kind for one in findings):
        for finding in [one for one in findings if one.kind == kind][:SHOWN]:
            shown.update(dict.fromkeys(finding.samples[:SHOWN]))
    names = {}
    folder.mkdir(parents=True, exist_ok=True)
    for number in shown:
        try:
            image = thumbnails(index, refs[number])[0]
        except UnreadableMediaError:  # read before, so it changed in the meantime; the finding is listed without it
            continue
        names[number] = f"{number:05}.jpg"
        with replacing(folder / names[number]) as temporary:
            image.convert("RGB").save(temporary, "JPEG", quality=85)
    return names
