"""One micro-batch's loss: noise, a level, the denoiser's answer, and how far off it is.

    step = TrainStep(spec, facts, Goal.from_config(config.objective, facts, trained), seed=42)
    step(denoiser, batch, "high_noise").total.backward()

Noise and levels are functions of (seed, global sample index), so a sample is asked the same question whichever rank or
batch it is in (with `objective.stratified`, its level also depends on its place in the micro-batch). Nothing here waits
for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gracetune.cache.batches import Batch
from gracetune.config.run_config import Objective
from gracetune.diffusion.noise import sample_noise
from gracetune.diffusion.noise_levels import LevelSampler
from gracetune.diffusion.schedule import noisy, target
from gracetune.diffusion.weighting import Weighting, huber_delta, sample_losses
from gracetune.models.common.flow_shift import shift_along
from gracetune.models.experts import noise_range_of
from gracetune.models.spec import ExpertName, ModelFacts, ModelSpec
from gracetune.models.token_routing import TokenRouter
from gracetune.train.cuda_graphs import Replay

LATENTS_PER_TOKEN = 4
"""Families whose shift follows the resolution all make one token of 2 x 2 latents (`models.common.flow_shift`)."""


@dataclass(frozen=True)
class TrainingGoal:
    """What is learnt: the config's objective, decided for one model."""

    objective: Objective
    levels: Mapping[ExpertName, LevelSampler]
    """For each trained expert, inside its own window."""
    weighting: Weighting

    @classmethod
    def from_config(cls, objective: Objective, facts: ModelFacts, trained: Sequence[ExpertName]) -> TrainingGoal:
        line = objective.resolution_shift
        rule = facts.details.get("resolution_shift") if line is None else shift_along(line)
        levels = {
            expert: LevelSampler.from_config(
                objective, facts.schedule, shift=facts.shift, rule=rule, noise_range=noise_range_of(expert, facts)
            )
            for expert in trained
        }
        return cls(objective, levels, Weighting.from_config(objective, facts.schedule))


@dataclass(frozen=True, eq=False)
class StepLoss:
    """On the device, all of it."""

    total: Tensor
    """The sum over the samples, each times its own weight: what is differentiated."""
    each: Tensor
    """[B], detached: the same before it is summed."""
    level: Tensor
    """[B]"""
    answer: Tensor
    """Detached: what the denoiser predicted. The next pass may overwrite it: a CUDA graph has one place for it."""


class TrainStep:
    def __init__(
        self,
        spec: ModelSpec,
        facts: ModelFacts,
        goal: TrainingGoal,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        base: Callable[[Batch, ExpertName], AbstractContextManager[None] | None] = lambda batch, expert: None,
        replay: Replay | None = None,
        router: TokenRouter | None = None,
    ) -> None:
        """`dtype` is what the denoiser is given. `base` says of a batch that the base model's own answer is its target,
        and makes the denoiser the base model (`TrainedModel.base_for`). `replay` asks the denoiser that is trained."""
        self._spec, self._facts, self._goal = spec if router is None else router.spec, facts, goal
        self._replay, self._router = replay, router
        self._seed, self._dtype, self._autocast, self._base = seed, dtype, autocast, base

    def __call__(self, denoiser: nn.Module, batch: Batch, expert: ExpertName) -> StepLoss:
        if self._router is not None:
            batch = self._router.routed(batch)
        base = self._base(batch, expert)
        return self.at(denoiser, batch, self._levels(batch, expert), self._seed, batch.ref.indexes, base)

    def _levels(self, batch: Batch, expert: ExpertName) -> Tensor:
        latents = batch.tensors["latents"]
        tokens = math.prod(latents.shape[2:]) // LATENTS_PER_TOKEN
        return _on(self._goal.levels[expert].levels(self._seed, batch.ref.indexes, tokens), latents.device)

    def answer(self, denoiser: nn.Module, batch: Batch, expert: ExpertName) -> Tensor:
        """What the denoiser predicts in a step with this batch. It is the same forward pass: a compiled denoiser needs
        no graphs of its own for it, a captured one is replayed, and nothing is captured."""
        with nullcontext() if self._replay is None else self._replay.no_capture():
            return self(denoiser, batch, expert).answer.clone()

    def at(
        self, denoiser: nn.Module, batch: Batch, level: Tensor, seed: int, indexes: Sequence[int],
        base: AbstractContextManager[None] | None = None,
    ) -> StepLoss:  # fmt: skip
        """The loss at given noise levels [B], with the noise of other draws: what a held-out loss asks."""
        schedule, objective = self._facts.schedule, self._goal.objective
        clean = batch.tensors["latents"].float()
        noise = sample_noise(clean, objective, seed, indexes)
        seen = noisy(schedule, clean, noise.seen, level).to(self._dtype)
        if base is None:
            wanted = target(schedule, clean, noise.perturbed, level)
        else:
            with base, torch.no_grad(), self._autocast():
                wanted = self._spec.predict(denoiser, seen, level, batch.tensors, self._facts).float()
        predict = self._spec.predict if self._replay is None else self._replay
        with self._autocast():
            answer = predict(denoiser, seen, level, batch.tensors, self._facts)
        delta = huber_delta(objective, schedule, level)
        losses = sample_losses(answer, wanted, objective, loss_mask(batch), delta)
        losses = losses * self._goal.weighting.weights(schedule, level)
        weights = [sample.loss_weight for sample in batch.ref.samples]
        if any(weight != 1.0 for weight in weights):
            losses = losses * _on(weights, losses.device)
        return StepLoss(losses.sum(), losses.detach(), level, answer.detach())

    @property
    def counters(self) -> dict[str, int]:
        """Captures and replays of CUDA graphs; nothing where the run has none."""
        return {} if self._replay is None else self._replay.counters

    def release(self) -> None:
        """Give back the memory that recorded steps hold, for who needs it between two of them."""
        if self._replay is not None:
            self._replay.release()


def loss_mask(batch: Batch) -> Tensor | None:
    """What each element's loss is multiplied by; None where the batch has no masks."""
    mask = batch.tensors.get("loss_mask")
    if mask is None or not any(sample.normalises_mask for sample in batch.ref.samples):
        return mask
    mask = mask.float()
    # A batch that is masked all over learns nothing, and must not divide by 0.
    return mask / mask.mean().clamp(min=torch.finfo(torch.float32).tiny)


def _on(values: Sequence[float], device: torch.device) -> Tensor:
    """From page-locked memory the copy is only queued; the host does not wait for it."""
    tensor = torch.tensor(values, dtype=torch.float32)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
