"""The held-out loss: the loss on samples that are never trained on (`dataset_type: eval`, or `held_out` of a dataset).

The noise and the noise levels are always the same, so two values of a run differ only by the training between them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from gracetune.cache.batches import Batch, EntrySource, SampleKeys
from gracetune.cache.collate import collate
from gracetune.cache.errors import EntriesError
from gracetune.config.run_config import RunConfig
from gracetune.data.captions import variant_ref
from gracetune.data.index import Appearance, DataIndex
from gracetune.data.items import DatasetIndex
from gracetune.data.refs import BatchRef, SampleRef
from gracetune.errors import GracetuneError
from gracetune.models.experts import noise_range_of
from gracetune.models.spec import ExpertName, ModelFacts
from gracetune.seeded_random import torch_seed
from gracetune.telemetry.dispatcher import Telemetry
from gracetune.telemetry.events import HeldOutLoss
from gracetune.train.data import CachedData
from gracetune.train.hooks import Callback, RunStarts, StepEnds
from gracetune.train.job import EvaluatedModel, Pauses
from gracetune.train.view import View

LEVELS = 5
"""Noise levels of each expert, evenly spaced in its noise range."""
MOST = 64
"""Largest number of samples. It limits the time of one measurement."""


def held_out_refs(index: DataIndex) -> list[SampleRef]:
    """All held-out samples, each with a fixed crop and caption."""
    return fixed_refs(index, index.held_out)


def fixed_refs(index: DataIndex, datasets: Iterable[DatasetIndex]) -> list[SampleRef]:
    """All samples of these datasets, each with a fixed crop and caption."""
    refs = []
    for dataset in datasets:
        for number, item in enumerate(dataset.items):
            caption = variant_ref(item.captions, dataset.dataset.captions, index.seed, number, visit=0)
            refs.append(index.describe(dataset, item, Appearance(variant=0, combination=0), caption))
    return refs


def levels_of(expert: ExpertName, facts: ModelFacts) -> list[float]:
    lowest, highest = noise_range_of(expert, facts)
    return [lowest + (highest - lowest) * (number + 0.5) / LEVELS for number in range(LEVELS)]


class HeldOut(Callback):
    def __init__(
        self, config: RunConfig, cached: CachedData, model: EvaluatedModel, pauses: Pauses, telemetry: Telemetry,
        view: View, *, repair: Callable[[EntriesError], None],
    ) -> None:  # fmt: skip
        """`repair` encodes damaged cache entries again."""
        self._every = config.validation.loss_every_steps
        self._latents, self._texts, self._keys = cached.latents, cached.texts, cached.keys
        self._model, self._pauses, self._telemetry, self._view = model, pauses, telemetry, view
        self._repair = repair
        self._seed = torch_seed(config.training.seed, "held out")
        refs = held_out_refs(cached.index)
        self._refs = refs[:: max(1, -(-len(refs) // MOST))]
        if self._every is not None and not refs:
            view.warn("validation.loss_every_steps: no dataset of type eval, so there is no held-out loss")
        elif self._every is not None and len(self._refs) < len(refs):
            view.report(f"held-out loss: {len(self._refs)} of {len(refs)} samples, evenly chosen")

    def start(self, begun: RunStarts) -> None:
        if self._every is not None and begun.position.step == 0:
            self._measure(0)

    def step_ends(self, done: StepEnds) -> None:
        if self._every is not None and done.step % self._every == 0:
            self._measure(done.step)

    def _measure(self, step: int) -> None:
        if not self._refs:
            return
        self._model.step.release()
        with self._pauses.counted():
            batches, problem = self._batches()
            gathered = self._model.runtime.all_of(problem)
            if gathered:  # all ranks skip it, because a sharded model needs all of them
                self._view.warn(f"no held-out loss at step {step}, and training continues: {gathered[0]}")
                return
            found = held_out_losses(self._model, batches, self._seed)
        for expert, losses in found.items():
            named = {f"{level:.3f}": loss for level, loss in losses.items()}
            mean = statistics.fmean(losses.values())
            self._telemetry.emit(HeldOutLoss(step=step, stage=expert, losses=named, mean=mean))
            whose = f" ({expert})" if expert else ""
            self._view.report(f"held-out loss at step {step}: {mean:.4f}{whose}")

    def _batches(self) -> tuple[list[Batch], str | None]:
        """The batches, or none and the reason, if a damaged entry cannot be encoded again."""
        try:
            return [self._batch(ref, number) for number, ref in enumerate(self._refs)], None
        except GracetuneError as error:
            return [], str(error)

    def _batch(self, ref: SampleRef, number: int) -> Batch:
        read = partial(batch_of, ref, number, self._latents, self._texts, self._keys, self._model.device)
        for _ in range(2):  # the latents and the text embedding may both be damaged
            try:
                return read()
            except EntriesError as error:
                self._repair(error)
        return read()


def batch_of(
    ref: SampleRef, number: int, latents: EntrySource, texts: EntrySource, keys: SampleKeys, device: torch.device
) -> Batch:  # fmt: skip
    """Read one sample from the caches as a batch of size 1."""
    entry: dict[str, torch.Tensor] = {}
    for store, key in ((latents, keys.of_latent(ref)), (texts, keys.of_text(ref))):
        found = store.look_up(key)
        entry.update(store.read(key) if found is None else found)
    tensors = {name: part.build(device) for name, part in collate([keys.used(entry, ref)], [ref.path]).items()}
    return Batch(BatchRef((ref,), ref.bucket, indexes=(number,), epoch=0, global_samples=1), tensors)


def held_out_losses(model: EvaluatedModel, batches: Sequence[Batch], seed: int) -> dict[ExpertName, dict[float, float]]:
    """Mean loss by expert and noise level. Every rank measures all samples: a sharded model needs all ranks."""
    found: dict[ExpertName, dict[float, float]] = {}
    for expert, losses in losses_by_sample(model, batches, seed).items():
        levels = levels_of(expert, model.trained_model.facts)
        found[expert] = dict(zip(levels, losses.mean(0).tolist(), strict=True))
    return found


def losses_by_sample(model: EvaluatedModel, batches: Iterable[Batch], seed: int) -> dict[ExpertName, Tensor]:
    """The loss of each batch of one sample at each noise level, by expert: [samples, levels]. Iterates once for each
    expert."""
    active = model.trained_model.host.active
    found: dict[ExpertName, Tensor] = {}
    with model.trained_model.evaluating(), model.state.as_delivered():
        for expert in model.trained_model.trained:
            denoiser = model.trained_model.host.activate(expert)
            levels = levels_of(expert, model.trained_model.facts)
            losses = []  # stay on the device: no synchronization per sample
            for batch in batches:
                for level in levels:
                    noise_level = torch.full((1,), level, device=model.device)
                    losses.append(model.step.at(denoiser, batch, noise_level, seed, batch.ref.indexes).each.sum())
            found[expert] = torch.stack(losses).reshape(-1, len(levels))
    if active is not None:
        model.trained_model.host.activate(active)
    return found
