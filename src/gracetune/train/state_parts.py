"""The pieces of a run's saved state: each belongs to one part, and all of them are read from the part itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from gracetune.checkpoint.state_parts import SavedState
from gracetune.config.native import shareable
from gracetune.config.run_config import RunConfig
from gracetune.errors import GracetuneError
from gracetune.optim.build import load_named_state, named_state
from gracetune.optim.ema import EmaWeights
from gracetune.optim.named_state import NamedState, differences
from gracetune.optim.schedules import move_to
from gracetune.train.loss_scale import LossScale
from gracetune.train.position import Position
from gracetune.train.trained_model import TrainedModel
from gracetune.train.training_state import TrainingState

VERSION = 1


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together: a collective, so every rank calls it."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def spread(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as `like` is held."""
    tensor = tensor.to(like.device, like.dtype)
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor


def alphas(trained_model: TrainedModel) -> dict[str, float]:
    """By layers as the tensors name them. A run has its own; `adapters.safetensors_file` reads them with the
    tensors."""
    return {
        f"{expert}/{path}" if expert else path: alpha
        for expert, attached in trained_model.attached.items()
        for path, alpha in attached.alphas.items()
    }


@dataclass(frozen=True, eq=False)
class CheckpointSource:
    """What the parts of a checkpoint are read from, and loaded into."""

    config: RunConfig
    trained_model: TrainedModel
    state: TrainingState
    allow_other_data: bool = False
    """Whether the run may go on with other data than the checkpoint was made with."""


Notes = tuple[str, ...]


@dataclass(frozen=True)
class StatePart:
    """One part of a checkpoint: its own files, written and read by whoever owns that state.

    Every rank calls `save`, so it may gather what is sharded. `load` returns what the user should know.
    """

    name: str
    """Of its files: lower case letters, digits and underscores."""
    save: Callable[[CheckpointSource], SavedState]
    load: Callable[[CheckpointSource, SavedState], Notes]
    is_kept: Callable[[CheckpointSource], bool] = lambda run: True
    """Whether this run has such state."""


# -- parameters: an adapter's tensors, or the model's own in a full fine-tune ---------------------------------------


def _save_parameters(run: CheckpointSource) -> SavedState:
    tensors = {name: whole(one) for name, one in run.trained_model.parameters().items()}
    return SavedState({"version": VERSION, "alphas": alphas(run.trained_model)}, tensors)


@torch.no_grad()
def _load_parameters(run: CheckpointSource, saved: SavedState) -> Notes:
    ours = run.trained_model.parameters()
    wrong = differences(_shapes(ours), _shapes(saved.tensors))
    if wrong:
        raise GracetuneError(
            f"the checkpoint trains other parameters than this run:\n{wrong}\n"
            "resume with the adapter it was made with, or start anew with --resume none"
        )
    for name, parameter in ours.items():
        parameter.copy_(spread(saved.tensors[name], parameter))
    return ()


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


# -- optimizer --------------------------------------------------------------------------------------------------------


def _save_optimizer(run: CheckpointSource) -> SavedState:
    state = named_state(run.state.optimizer, run.trained_model.parameters())
    return SavedState({"version": VERSION, **state.json}, state.tensors)


def _load_optimizer(run: CheckpointSource, saved: SavedState) -> Notes:
    rest = {name: value for name, value in saved.json.items() if name != "version"}
    load_named_state(run.state.optimizer, run.trained_model.parameters(), NamedState(saved.tensors, rest))
    return ()


# -- schedule: rates are a function of the step; only how many steps were taken is kept -------------------------------


def _save_schedule(run: CheckpointSource) -> SavedState:
    return SavedState({"version": VERSION, "steps": run.state.schedule.last_epoch})


def _load_schedule(run: CheckpointSource, saved: SavedState) -> Notes:
    move_to(run.state.schedule, saved.json["steps"])
    return ()


# -- position: steps (and so whose turn it is), the ramp's micro-batches, samples, epoch; and where the loader is ------


def _save_position(run: CheckpointSource) -> SavedState:
    return SavedState({"version": VERSION, **asdict(run.state.position), "loader": run.state.saved_loader})


def _load_position(run: CheckpointSource, saved: SavedState) -> Notes:
    position = Position(**{name: saved.json[name] for name in asdict(run.state.position)})
    return run.state.load_position(position, saved.json["loader"], allow_other_data=run.allow_other_data)


# -- config: for whoever looks at a checkpoint ------------------------------------------------------------------------


def _save_config(run: CheckpointSource) -> SavedState:
    return SavedState({"version": VERSION, "config": shareable(run.config)})


def _load_config(run: CheckpointSource, saved: SavedState) -> Notes:
    """Nothing: the run has its own, and what may not differ is in the identity."""
    return ()


# -- ema --------------------------------------------------------------------------------------------------------------


def _ema(run: CheckpointSource) -> EmaWeights:
    assert run.state.ema is not None, "only a run with averages keeps them"
    return run.state.ema


def _save_ema(run: CheckpointSource) -> SavedState:
    tensors = {name: whole(average) for name, average in _ema(run).averages.items()}
    return SavedState({"version": VERSION, "steps": _ema(run).steps, "alphas": alphas(run.trained_model)}, tensors)


def _load_ema(run: CheckpointSource, saved: SavedState) -> Notes:
    like = _ema(run).averages
    _ema(run).load_named_state(
        {name: spread(tensor, like[name]) if name in like else tensor for name, tensor in saved.tensors.items()},
        saved.json["steps"],
    )
    return ()


# -- loss scale -------------------------------------------------------------------------------------------------------


def _scale(run: CheckpointSource) -> LossScale:
    assert isinstance(run.state.scale, LossScale), "only fp16 has a loss scale"
    return run.state.scale


def _load_scale(run: CheckpointSource, saved: SavedState) -> Notes:
    _scale(run).load(saved.json, saved.tensors)
    return ()


PARTS: tuple[StatePart, ...] = (
    StatePart("parameters", _save_parameters, _load_parameters),
    StatePart("optimizer", _save_optimizer, _load_optimizer),
    StatePart("schedule", _save_schedule, _load_schedule),
    StatePart("position", _save_position, _load_position),
    StatePart("config", _save_config, _load_config),
    StatePart("ema", _save_ema, _load_ema, lambda run: run.state.ema is not None),
    StatePart("loss_scale", lambda run: _scale(run).save(), _load_scale, lambda run: run.state.scale.skips),
)
"""Everything rank 0 writes for all: a new part is one line here. What each rank has for itself is
`checkpoint.random_state`."""


@dataclass(eq=False)
class BoundPart:
    """A part of this run, as `checkpoint.state_parts.CheckpointPart` has it."""

    part: StatePart
    run: CheckpointSource
    notes: Notes = ()
    """What loading had to say."""

    @property
    def name(self) -> str:
        return self.part.name

    def save(self) -> SavedState:
        return self.part.save(self.run)

    def load(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.notes = self.part.load(self.run, SavedState(json, tensors))


def shared_parts(run: CheckpointSource) -> list[BoundPart]:
    return [BoundPart(part, run) for part in PARTS if part.is_kept(run)]
