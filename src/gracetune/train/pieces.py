"""The pieces of a run's saved state: each belongs to one part, and all of them are read from the part itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from gracetune.checkpoint.pieces import Piece, Saved
from gracetune.config.run_config import RunConfig
from gracetune.errors import GracetuneError
from gracetune.optim.build import load_named_state, named_state
from gracetune.optim.naming import NamedState, differences
from gracetune.optim.schedules import move_to
from gracetune.train.job import Job
from gracetune.train.position import Position
from gracetune.train.scaling import LossScale
from gracetune.train.trainee import Trainee

VERSION = 1


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together: a collective, so every rank calls it."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def spread(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as `like` is held."""
    tensor = tensor.to(like.device, like.dtype)
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor


def alphas(trainee: Trainee) -> dict[str, float]:
    """By layers as the tensors name them. A run has its own; `adapters.files` reads them with the tensors."""
    return {
        f"{expert}/{path}" if expert else path: alpha
        for expert, attached in trainee.attached.items()
        for path, alpha in attached.alphas.items()
    }


class ParametersPiece:
    """What is trained: an adapter's tensors, or the model's own in a full fine-tune."""

    name = "parameters"

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee

    def save(self) -> Saved:
        tensors = {name: whole(one) for name, one in self._trainee.parameters().items()}
        return Saved({"version": VERSION, "alphas": alphas(self._trainee)}, tensors)

    @torch.no_grad()
    def load(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        ours = self._trainee.parameters()
        wrong = differences(_shapes(ours), _shapes(tensors))
        if wrong:
            raise GracetuneError(
                f"the checkpoint trains other parameters than this run:\n{wrong}\n"
                "resume with the adapter it was made with, or start anew with --resume none"
            )
        for name, parameter in ours.items():
            parameter.copy_(spread(tensors[name], parameter))


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


class OptimizerPiece:
    name = "optimizer"

    def __init__(self, job: Job) -> None:
        self._job = job

    def save(self) -> Saved:
        state = named_state(self._job.optimizer, self._job.trainee.parameters())
        return Saved({"version": VERSION, **state.json}, state.tensors)

    def load(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        rest = {name: value for name, value in json.items() if name != "version"}
        load_named_state(self._job.optimizer, self._job.trainee.parameters(), NamedState(tensors, rest))


class EmaPiece:
    name = "ema"

    def __init__(self, job: Job) -> None:
        assert job.ema is not None, "only a run with an EMA saves one"
        self._ema, self._trainee = job.ema, job.trainee

    def save(self) -> Saved:
        tensors = {name: whole(average) for name, average in self._ema.averages.items()}
        return Saved({"version": VERSION, "steps": self._ema.steps, "alphas": alphas(self._trainee)}, tensors)

    def load(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        like = self._ema.averages
        self._ema.load_named_state(
            {name: spread(tensor, like[name]) if name in like else tensor for name, tensor in tensors.items()},
            json["steps"],
        )


class SchedulePiece:
    """The rates are a function of the step; only how many steps were taken is kept."""

    name = "schedule"

    def __init__(self, job: Job) -> None:
        self._schedule = job.schedule

    def save(self) -> Saved:
        return Saved({"version": VERSION, "steps": self._schedule.last_epoch})

    def load(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        move_to(self._schedule, json["steps"])


class PositionPiece:
    """Steps (and so whose turn it is), the ramp's micro-batches, samples, epoch; and where the loader is."""

    name = "position"

    def __init__(self, job: Job, *, allow_other_data: bool = False) -> None:
        self._job, self._allow = job, allow_other_data
        self.notes: tuple[str, ...] = ()
        """What differs in the data, where that was allowed."""

    def save(self) -> Saved:
        position = asdict(self._job.position)
        return Saved({"version": VERSION, **position, "loader": self._job.saved_loader})

    def load(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.notes = self._job.loader.load_state_dict(json["loader"], allow_other_data=self._allow)
        names = asdict(self._job.position)
        self._job.position = Position(**{name: json[name] for name in names})
        self._job.saved_loader = self._job.loader.state_dict()


def shareable(config: RunConfig) -> dict[str, Any]:
    """The configuration as it may be shown to others. A webhook's address is its password: only its host is left."""
    values = config.model_dump(mode="json")
    if config.logging.webhook is not None:
        values["logging"]["webhook"] = f"https://{urlsplit(config.logging.webhook).hostname}/(hidden)"
    return values


class ConfigPiece:
    """For whoever looks at a checkpoint: the whole configuration it was made with."""

    name = "config"

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def save(self) -> Saved:
        return Saved({"version": VERSION, "config": shareable(self._config)})

    def load(self, json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Nothing: the run has its own, and what may not differ is in the identity."""


def shared_pieces(job: Job, config: RunConfig, *, allow_other_data: bool = False) -> list[Piece]:
    """Everything rank 0 writes for all. What each rank has for itself is `checkpoint.random_state`."""
    pieces: list[Piece] = [
        ParametersPiece(job.trainee),
        OptimizerPiece(job),
        SchedulePiece(job),
        PositionPiece(job, allow_other_data=allow_other_data),
        ConfigPiece(config),
    ]
    if job.ema is not None:
        pieces.append(EmaPiece(job))
    if isinstance(job.scale, LossScale):
        pieces.append(job.scale)
    return pieces
