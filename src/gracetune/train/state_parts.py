"""The parts of a checkpoint: parameters, optimizer, schedule, position, config, EMA, loss scale."""

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
from gracetune.optim.averages import EmaWeights
from gracetune.optim.build import load_named_state, named_state
from gracetune.optim.named_state import NamedState, differences
from gracetune.optim.schedules import move_to
from gracetune.train.gradients import LossScale
from gracetune.train.trained_model import TrainedModel
from gracetune.train.training_state import Position, TrainingState

VERSION = 1


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one. This is a collective: every rank must call it."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def spread(tensor: Tensor, like: Tensor) -> Tensor:
    """A full tensor on the device, in the dtype and with the sharding of `like`."""
    tensor = tensor.to(like.device, like.dtype)
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor


def alphas(trained_model: TrainedModel) -> dict[str, float]:
    """The alpha of each layer, by the layer's name in the checkpoint's tensors. Loading a checkpoint ignores them, as
    the run has its own; `adapters.safetensors_file` reads a checkpoint as an adapter and needs them."""
    return {
        f"{expert}/{path}" if expert else path: alpha
        for expert, attached in trained_model.attached.items()
        for path, alpha in attached.alphas.items()
    }


@dataclass(frozen=True, eq=False)
class CheckpointSource:
    """The objects whose state is saved to a checkpoint and restored from it."""

    config: RunConfig
    trained_model: TrainedModel
    state: TrainingState
    allow_other_data: bool = False
    """Whether the run may resume with data that differs from the checkpoint's."""


Notes = tuple[str, ...]
"""Lines for the user."""


@dataclass(frozen=True)
class StatePart:
    """One part of a checkpoint, with its own files.

    Every rank calls `save`, so it may gather sharded tensors. `load` returns notes for the user.
    """

    name: str
    """The name of its files: lower-case letters, digits and underscores."""
    save: Callable[[CheckpointSource], SavedState]
    load: Callable[[CheckpointSource, SavedState], Notes]
    is_kept: Callable[[CheckpointSource], bool] = lambda run: True
    """Whether this run has this part."""


# -- parameters: an adapter's tensors, or the model's own in a full fine-tune ---------------------------------------


def _save_parameters(run: CheckpointSource) -> SavedState:
    run.state.wait_for_updates()
    tensors = {name: whole(one) for name, one in run.trained_model.parameters().items()}
    return SavedState({"version": VERSION, "alphas": alphas(run.trained_model)}, tensors, run.config.has_chunked_state)


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
        parameter.copy_(spread(saved.tensors[name], parameter))  # a copy: the saved tensor may be mapped from a file
    return ()


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


# -- optimizer --------------------------------------------------------------------------------------------------------


def _save_optimizer(run: CheckpointSource) -> SavedState:
    state = named_state(run.state.optimizer, run.trained_model.parameters())
    return SavedState({"version": VERSION, **state.json}, state.tensors, run.config.has_chunked_state)


def _load_optimizer(run: CheckpointSource, saved: SavedState) -> Notes:
    rest = {name: value for name, value in saved.json.items() if name != "version"}
    load_named_state(run.state.optimizer, run.trained_model.parameters(), NamedState(saved.tensors, rest))
    return ()


# -- schedule: learning rates are a function of the step, so only the number of steps is saved ------------------------


def _save_schedule(run: CheckpointSource) -> SavedState:
    return SavedState({"version": VERSION, "steps": run.state.schedule.last_epoch})


def _load_schedule(run: CheckpointSource, saved: SavedState) -> Notes:
    move_to(run.state.schedule, saved.json["steps"])
    return ()


# -- position: steps (from which the active expert follows), micro-batches, samples, epoch; the loader's position -----


def _save_position(run: CheckpointSource) -> SavedState:
    return SavedState({"version": VERSION, **asdict(run.state.position), "loader": run.state.saved_loader})


def _load_position(run: CheckpointSource, saved: SavedState) -> Notes:
    position = Position(**{name: saved.json[name] for name in asdict(run.state.position)})
    return run.state.load_position(position, saved.json["loader"], allow_other_data=run.allow_other_data)


# -- config: for people who inspect a checkpoint ----------------------------------------------------------------------


def _save_config(run: CheckpointSource) -> SavedState:
    return SavedState({"version": VERSION, "config": shareable(run.config)})


def _load_config(run: CheckpointSource, saved: SavedState) -> Notes:
    """Load nothing: the run has its own config, and settings that must not differ are in the identity."""
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
"""All parts that rank 0 writes. A new part needs one line here. The state that each rank saves for itself is in
`checkpoint.state_parts`."""


@dataclass(eq=False)
class BoundPart:
    """A part bound to this run. Implements `checkpoint.state_parts.CheckpointPart`."""

    part: StatePart
    run: CheckpointSource
    notes: Notes = ()
    """Notes from loading."""

    @property
    def name(self) -> str:
        return self.part.name

    def save(self) -> SavedState:
        return self.part.save(self.run)

    def load(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        found = json.get("version")
        if found != VERSION or isinstance(found, bool):
            raise GracetuneError(
                f"the checkpoint's {self.name} has version {found}; this release reads version {VERSION}. "
                "Resume with the release that saved it, or start from step 0 with --resume none"
            )
        self.notes = self.part.load(self.run, SavedState(json, tensors))


def shared_parts(run: CheckpointSource) -> list[BoundPart]:
    return [BoundPart(part, run) for part in PARTS if part.is_kept(run)]
