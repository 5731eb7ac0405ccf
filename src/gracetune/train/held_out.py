"""The loss on samples that are never trained on (`dataset_type: eval`), always with the same noise at the same levels.

So two numbers of a run differ by what was learnt between them, and by nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from gracetune.cache.batches import Batch, Entries, Keys
from gracetune.cache.collate import collate
from gracetune.config.run_config import RunConfig
from gracetune.data.captions import caption_ref
from gracetune.data.index import DataIndex, Turn
from gracetune.data.refs import BatchRef, SampleRef
from gracetune.models.experts import window_of_levels
from gracetune.models.spec import ExpertName
from gracetune.seeded_random import torch_seed
from gracetune.telemetry.events import HeldOutLoss
from gracetune.telemetry.hub import Telemetry
from gracetune.train.control import Stop
from gracetune.train.data import Cached
from gracetune.train.job import Job
from gracetune.train.loop import WindowDone
from gracetune.train.view import View

LEVELS = 5
"""Of each expert, evenly inside its window."""
MOST = 64
"""Samples; a held-out loss should cost less than what it watches over."""


def held_out_refs(index: DataIndex) -> list[SampleRef]:
    refs = []
    for dataset in index.held_out:
        for number, item in enumerate(dataset.items):
            refs.append(index.describe(dataset, item, Turn(0, 0), caption_ref(item.captions, 0.0, index.seed, number)))
    return refs


def levels_of(expert: ExpertName, job: Job) -> list[float]:
    lowest, highest = window_of_levels(expert, job.trainee.facts)
    return [lowest + (highest - lowest) * (number + 0.5) / LEVELS for number in range(LEVELS)]


class HeldOut:
    def __init__(self, config: RunConfig, cached: Cached, telemetry: Telemetry, view: View) -> None:
        self._every = config.validation.loss_every_steps
        self._latents, self._texts, self._keys = cached.latents, cached.texts, cached.keys
        self._telemetry, self._view = telemetry, view
        self._seed = torch_seed(config.training.seed, "held out")
        refs = held_out_refs(cached.index)
        self._refs = refs[:: max(1, -(-len(refs) // MOST))]
        if self._every is not None and not refs:
            view.warn("validation.loss_every_steps: no dataset of type eval, so there is no held-out loss")
        elif self._every is not None and len(self._refs) < len(refs):
            view.say(f"held-out loss: {len(self._refs)} of {len(refs)} samples, evenly chosen")

    def start(self, job: Job) -> None:
        if self._every is not None and job.position.step == 0:
            self._measure(job)

    def window(self, job: Job, done: WindowDone) -> None:
        if self._every is not None and done.step % self._every == 0:
            self._measure(job)

    def end(self, job: Job, stop: Stop) -> None: ...

    def _measure(self, job: Job) -> None:
        if not self._refs:
            return
        job.step.release()
        with job.pausing():
            found = held_out_losses(job, self._batches(job), self._seed)
        for expert, losses in found.items():
            named = {f"{level:.3f}": loss for level, loss in losses.items()}
            mean = statistics.fmean(losses.values())
            self._telemetry.emit(HeldOutLoss(step=job.position.step, stage=expert, losses=named, mean=mean))
            whose = f" ({expert})" if expert else ""
            self._view.say(f"held-out loss at step {job.position.step}: {mean:.4f}{whose}")

    def _batches(self, job: Job) -> list[Batch]:
        return [batch_of(ref, number, self._latents, self._texts, self._keys, job.device)
                for number, ref in enumerate(self._refs)]  # fmt: skip


def batch_of(
    ref: SampleRef, number: int, latents: Entries, texts: Entries, keys: Keys, device: torch.device
) -> Batch:  # fmt: skip
    """One sample, read from the caches as a batch of its own."""
    entry: dict[str, torch.Tensor] = {}
    for store, key in ((latents, keys.of_latent(ref)), (texts, keys.of_text(ref))):
        found = store.look_up(key)
        entry.update(store.read(key) if found is None else found)
    tensors = {name: part.build(device) for name, part in collate([entry], [ref.path]).items()}
    return Batch(BatchRef((ref,), ref.bucket, (number,), 0, 1), tensors)


def held_out_losses(job: Job, batches: Sequence[Batch], seed: int) -> dict[ExpertName, dict[float, float]]:
    """Mean loss by expert and noise level. Every rank measures all samples: a sharded model needs them all."""
    active = job.trainee.host.active
    found: dict[ExpertName, dict[float, float]] = {}
    with job.trainee.evaluating(), job.as_delivered():
        for expert in job.trainee.trained:
            denoiser = job.trainee.host.activate(expert)
            levels = levels_of(expert, job)
            sums = torch.zeros(len(levels), device=job.device)
            for batch in batches:
                for at, level in enumerate(levels):
                    noise_level = torch.full((1,), level, device=job.device)
                    sums[at] += job.step.at(denoiser, batch, noise_level, seed, batch.ref.indexes).each.sum()
            found[expert] = dict(zip(levels, (sums / len(batches)).tolist(), strict=True))
    if active is not None:
        job.trainee.host.activate(active)
    return found
