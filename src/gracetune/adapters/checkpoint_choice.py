"""Compare the checkpoints of a run: held-out loss, drift from the base model, samples. Recommend one, with the reason.

The held-out loss is the only value that can show which checkpoint is best, so a run without it gets no recommendation.
Drift is the norm of the adapter's change relative to the norm of the weights it changes. It is a distance from the base
model, not a measure of quality.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gracetune.adapters.adapter_files import open_adapter
from gracetune.adapters.delta import apply, needs_weight
from gracetune.adapters.loading_steps import files_by_step
from gracetune.adapters.state import AdapterState, ExpertStage, Layer
from gracetune.adapters.statistics import change_norm
from gracetune.errors import GracetuneError
from gracetune.telemetry.events import HeldOutLoss, SampleFile, ValidationDone
from gracetune.telemetry.report.run_history import RunHistory

EQUAL = 0.05
"""Held-out losses that differ by less than this share of the largest improvement count as equal."""

Weight = Callable[[str], Tensor]


@dataclass(frozen=True)
class Candidate:
    """One checkpoint of a run. What is unknown is None."""

    step: int
    files: tuple[Path, ...]
    held_out: Mapping[str, float]
    """Expert -> held-out loss. Empty if it was not measured at this step."""
    drift: Mapping[str, float]
    """Expert -> norm of the change relative to the norm of the adapted weights. Empty without the base model."""
    norm: Mapping[str, float]
    """Expert -> norm of the change. NaN if it depends on the base model, which is not here."""
    samples: tuple[SampleFile, ...]

    @property
    def loss(self) -> float | None:
        """The mean over the experts."""
        return statistics.fmean(self.held_out.values()) if self.held_out else None


@dataclass(frozen=True)
class CheckpointChoice:
    candidates: tuple[Candidate, ...]
    recommended: Candidate | None
    reason: str
    base_loss: float | None
    """The held-out loss at step 0, before any training."""
    notes: tuple[str, ...]


def compare_checkpoints(
    history: RunHistory, folder: Path, base_weight: Callable[[ExpertStage], Weight] | None, *, without_base: str = ""
) -> CheckpointChoice:
    """Compare the adapter files in a run's folder.

    `base_weight` reads the weights of the base model, by expert. `without_base` is the reason if it is None.
    """
    candidates, notes, bases = [], [], _BaseNorms(base_weight)
    for files in files_by_step(history.start.run, [*folder.glob("*.safetensors")]).values():
        try:
            states = [open_adapter(path, history.start.family or None).state() for path in files]
        except GracetuneError as error:
            notes.append(f"{files[0].name} is left out: {error}")
            continue
        step = _step_of(states[0])
        if step is None:
            notes.append(f"{files[0].name} is left out: its header has no step, so another program wrote it")
            continue
        norms: dict[str, float] = {state.expert: bases.change(state) for state in states}
        drift: dict[str, float] = {
            state.expert: norms[state.expert] / of_base for state in states if (of_base := bases.norm(state))
        }
        held_out = _held_out_at(history.held_out, step)
        samples = _samples_at(history.validations, step)
        candidates.append(Candidate(step, tuple(files), held_out, drift, norms, samples))
    candidates.sort(key=lambda one: one.step)
    if base_weight is None and candidates:
        notes.append(f"drift is unknown: {without_base}")
    if candidates and not any(one.samples for one in candidates):
        notes.append("no samples were generated at the steps of these files")
    before = _held_out_at(history.held_out, 0)
    base_loss = statistics.fmean(before.values()) if before else None
    recommended, reason = recommend(candidates, base_loss)
    return CheckpointChoice(tuple(candidates), recommended, reason, base_loss, tuple(notes))


class _BaseNorms:
    """Norms of changes and of the base weights that they change. Each weight's norm is computed once."""

    def __init__(self, base_weight: Callable[[ExpertStage], Weight] | None) -> None:
        self._base_weight = base_weight
        self._known: dict[tuple[str, str], float] = {}

    def norm(self, state: AdapterState) -> float | None:
        """The norm of all weights that the adapter changes; None without the base model."""
        if self._base_weight is None:
            return None
        weight = self._base_weight(state.expert)
        for path in state.layers:
            if (state.expert, path) not in self._known:
                self._known[state.expert, path] = float(weight(path).float().norm())
        return math.hypot(*(self._known[state.expert, path] for path in state.layers))

    def change(self, state: AdapterState) -> float:
        """The norm of the adapter's change; NaN if it depends on the base model, which is not here."""
        weight = None if self._base_weight is None else self._base_weight(state.expert)
        return math.hypot(*(_change_norm(layer, path, weight) for path, layer in state.layers.items()))


def recommend(candidates: Sequence[Candidate], base_loss: float | None) -> tuple[Candidate | None, str]:
    """The checkpoint with the lowest held-out loss, or an earlier one that is as good; and the reason.

    `candidates` are in the order of their steps.
    """
    known = [(one.loss, one) for one in candidates if one.loss is not None and math.isfinite(one.loss)]
    if not known:
        measured = "no held-out loss was measured at the step of a file that is left"
        hint = "compare the samples; for the next run, set validation.loss_every_steps and add a dataset of type eval"
        return None, f"unknown, because {measured}: {hint}"
    lowest = min(loss for loss, _ in known)
    reference = max([loss for loss, _ in known] if base_loss is None else [base_loss, lowest])
    as_good = lowest + EQUAL * (reference - lowest)
    loss, chosen = next((loss, one) for loss, one in known if loss <= as_good)
    reason = f"its held-out loss, {loss:.4g}, is the lowest"
    if loss > lowest:
        reason = f"its held-out loss, {loss:.4g}, is as good as the lowest, {lowest:.4g}, and no earlier one is"
    later = [value for value, one in known if one.step > chosen.step]
    if later and min(later) > as_good:
        reason += f"; later ones are worse ({later[-1]:.4g} at step {known[-1][1].step:,}), as when a run memorises"
    if base_loss is not None:
        change = "below" if loss < base_loss else "not below"
        reason += f"; it is {change} that of the base model, {base_loss:.4g}"
    unmeasured = len(candidates) - len(known)
    if unmeasured:
        reason += f". {unmeasured} of {len(candidates)} checkpoints have no held-out loss and were not considered"
    return chosen, reason


def _step_of(state: AdapterState) -> int | None:
    """The step in the file's header."""
    try:
        training: Any = json.loads(state.metadata.get("gracetune.training", ""))
    except (ValueError, RecursionError):
        return None
    step = training.get("steps") if isinstance(training, dict) else None
    return step if isinstance(step, int) else None


def _change_norm(layer: Layer, path: str, weight: Weight | None) -> float:
    if not needs_weight(layer):
        return change_norm(layer)
    if weight is None:
        return math.nan
    base = weight(path)
    return float((apply(layer, base) - base.float()).norm())


def _held_out_at(losses: Sequence[HeldOutLoss], step: int) -> dict[str, float]:
    return {one.stage: one.mean for one in losses if one.step == step}


def _samples_at(validations: Sequence[ValidationDone], step: int) -> tuple[SampleFile, ...]:
    return next((one.files for one in reversed(validations) if one.step == step), ())
