"""The loss of one micro-batch: sample noise and noise levels, predict, compare with the target.

    goal = TrainingGoal.from_config(config.objective, facts, trained)
    step = TrainStep(spec, facts, goal, seed=42)
    step(denoiser, batch, "high_noise").total.backward()

Noise and levels are functions of (seed, global sample index). A sample therefore gets the same noise and level on any
rank and in any batch. (With `objective.stratified` the level also depends on the sample's place in the micro-batch.)
Nothing here synchronizes with the device.
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
"""Every family whose flow shift depends on the resolution patches latents 2 x 2 (`models.common.flow_shift`)."""


@dataclass(frozen=True)
class TrainingGoal:
    """The training objective, resolved for one model."""

    objective: Objective
    levels: Mapping[ExpertName, LevelSampler]
    """For each trained expert, within its noise range."""
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
    """Loss of a micro-batch of B samples. All tensors are on the device."""

    total: Tensor
    """[]: the weighted sum over the samples. Call `backward` on this."""
    each: Tensor
    """[B], detached: the weighted loss of each sample."""
    level: Tensor
    """[B]: noise levels."""
    prediction: Tensor
    """[B, C, ...], detached: the denoiser's prediction. A CUDA graph overwrites it in the next pass."""


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
        """`dtype` is the dtype of the denoiser's inputs.

        `base` returns a context in which the denoiser is the base model, if that model's prediction is the batch's
        target (`TrainedModel.base_for`), else None. `replay` predicts through CUDA graphs where it can. `router` lets
        tokens skip blocks in training; `at` alone, which evaluation calls, uses all tokens.
        """
        self._spec, self._facts, self._goal = spec if router is None else router.spec, facts, goal
        self._replay, self._router = replay, router
        self._seed, self._dtype, self._autocast, self._base = seed, dtype, autocast, base

    def __call__(self, denoiser: nn.Module, batch: Batch, expert: ExpertName) -> StepLoss:
        if self._router is not None:
            batch = self._router.routed(batch)
        base = self._base(batch, expert)
        return self.at(denoiser, batch, self._levels(batch, expert), self._seed, batch.ref.indexes, base)

    def _levels(self, batch: Batch, expert: ExpertName) -> Tensor:
        latents = batch.tensors["latents"]  # [B, C, (F,) H, W]
        tokens = math.prod(latents.shape[2:]) // LATENTS_PER_TOKEN
        return _on(self._goal.levels[expert].levels(self._seed, batch.ref.indexes, tokens), latents.device)

    def predict(self, denoiser: nn.Module, batch: Batch, expert: ExpertName) -> Tensor:
        """The denoiser's prediction for this batch, by the same forward pass as in training.

        Existing compiled and CUDA graphs are reused, and no CUDA graph is captured.
        """
        with nullcontext() if self._replay is None else self._replay.no_capture():
            return self(denoiser, batch, expert).prediction.clone()

    def at(
        self, denoiser: nn.Module, batch: Batch, level: Tensor, seed: int, indexes: Sequence[int],
        base: AbstractContextManager[None] | None = None,
    ) -> StepLoss:  # fmt: skip
        """The loss at given noise levels [B], with the noise of `seed` and `indexes`."""
        schedule, objective = self._facts.schedule, self._goal.objective
        clean = batch.tensors["latents"].float()
        noise = sample_noise(clean, objective, seed, indexes)
        noisy_latents = noisy(schedule, clean, noise.added, level).to(self._dtype)
        if base is None:
            expected = target(schedule, clean, noise.target, level)
        else:
            with base, torch.no_grad(), self._autocast():
                expected = self._spec.predict(denoiser, noisy_latents, level, batch.tensors, self._facts).float()
        predict = self._spec.predict if self._replay is None else self._replay
        with self._autocast():
            prediction = predict(denoiser, noisy_latents, level, batch.tensors, self._facts)
        delta = huber_delta(objective, schedule, level)
        losses = sample_losses(prediction, expected, objective, loss_mask(batch), delta)  # [B]
        losses = losses * self._goal.weighting.weights(schedule, level)
        weights = [sample.loss_weight for sample in batch.ref.samples]
        if any(weight != 1.0 for weight in weights):
            losses = losses * _on(weights, losses.device)
        return StepLoss(losses.sum(), losses.detach(), level, prediction.detach())

    @property
    def counters(self) -> dict[str, int]:
        """Number of CUDA graph captures and replays; empty if the run uses no CUDA graphs."""
        return {} if self._replay is None else self._replay.counters

    def release(self) -> None:
        """Free the memory of captured CUDA graphs, for work between two steps. They are captured again later."""
        if self._replay is not None:
            self._replay.release()


def loss_mask(batch: Batch) -> Tensor | None:
    """The factor of each element's loss; None if the batch has no masks.

    It is normalized to a mean of 1 if the dataset of any sample asks for that.
    """
    mask = batch.tensors.get("loss_mask")
    if mask is None or not any(sample.normalises_mask for sample in batch.ref.samples):
        return mask
    mask = mask.float()
    # A completely masked batch has a loss of 0; without the clamp it would be 0 / 0.
    return mask / mask.mean().clamp(min=torch.finfo(torch.float32).tiny)


def _on(values: Sequence[float], device: torch.device) -> Tensor:
    """A copy from pinned memory is asynchronous, so the host does not wait for the device."""
    tensor = torch.tensor(values, dtype=torch.float32)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
