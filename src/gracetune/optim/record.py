"""The record of an optimizer: how to build it, which config keys it reads, how much memory its state takes.

The records are in `optim/optimizers/`; `config/registry.py` lists them. Configs are validated before torch is
imported, so this module and the records import torch only inside functions.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from gracetune.config.registry import OPTIMIZERS
from gracetune.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from gracetune.adapters.state import ExpertStage
    from gracetune.config.run_config import Optimizer as OptimizerConfig

Arguments = dict[str, Any]
"""Keyword arguments of an optimizer's constructor."""


@dataclass(frozen=True, eq=False)
class ParamGroup:
    """Parameters with common settings: usually the adapter of one expert."""

    name: str
    """Unique among the groups, and the same in every run."""
    expert: ExpertStage
    parameters: Mapping[str, Tensor]
    lr: float | None = None
    """None uses the learning rate of the config."""


class TrainedTensors(Protocol):
    """Trained tensors of one shape, and how many there are."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def count(self) -> int: ...

    @property
    def elements(self) -> int:
        """Elements of all of them together."""
        ...


@dataclass(frozen=True)
class StateSize:
    """Bytes of an optimizer's state, and a phrase that names its parts."""

    bytes: int
    why: str


Load = Callable[[Sequence["Tensor"]], type["Optimizer"]]
StateSizeOf = Callable[[Sequence[TrainedTensors], Mapping[str, Any]], StateSize]
"""Computes the size from the trained tensors and `optimizer.options`."""


def _as_they_are(arguments: Arguments, parameters: Sequence[Tensor]) -> Arguments:
    return arguments


def _nothing(config: OptimizerConfig, expert: ExpertStage) -> Arguments:
    return {}


def _no_notes(config: OptimizerConfig, groups: Sequence[ParamGroup]) -> list[str]:
    return []


@dataclass(frozen=True)
class OptimizerRecord:
    load: Load
    """Returns the optimizer's class, or raises ConfigError if its package or device is missing. The signature of the
    class's constructor defines the valid `options`."""
    state_size: StateSizeOf
    """The size of the state, for the memory plan."""
    prepare: Callable[[Arguments, Sequence[Tensor]], Arguments] = _as_they_are
    """Adjusts the constructor's arguments just before the optimizer is built."""
    hidden: tuple[str, ...] = ()
    """Constructor arguments that `options` may not set, because the run decides them."""
    no_effect: Mapping[str, str] = field(default_factory=dict)
    """Options of this optimizer in other trainers -> why they have no effect here."""
    own_keys: tuple[str, ...] = ()
    """Keys of the `optimizer` section that this optimizer reads and most others do not."""
    in_section: Mapping[str, str] = field(default_factory=dict)
    """Hidden constructor arguments -> the key of the `optimizer` section that sets them."""
    group_arguments: Callable[[OptimizerConfig, ExpertStage], Arguments] = _nothing
    """Returns the arguments that differ between param groups."""
    constant_rate: str = ""
    """Why the optimizer ignores the learning-rate schedule; empty if it follows one."""
    load_chunked: Load | None = None
    """Returns the class that keeps its state in chunks with a home (`optimizer.state`); None if there is none."""
    notes: Callable[[OptimizerConfig, Sequence[ParamGroup]], list[str]] = _no_notes
    """Returns notes on settings that have no effect or an unexpected one."""


def optimizer_record(name: str) -> OptimizerRecord:
    return OPTIMIZERS.load_as(name, OptimizerRecord)


def optimizer_state(tensors: Sequence[TrainedTensors], config: OptimizerConfig) -> StateSize:
    """The state size of the configured optimizer for these tensors."""
    return optimizer_record(config.name).state_size(tensors, config.options)


# -- building blocks of records ----------------------------------------------------------------------------------------


def class_of(class_path: str, package: str = "") -> Load:
    """A loader of the class at `module:Name`. `package` names the optional package to install if it is missing."""
    module, _, name = class_path.partition(":")

    def load(parameters: Sequence[Tensor]) -> type[Optimizer]:
        if package and importlib.util.find_spec(module.partition(".")[0]) is None:
            expected = f"the package {package}, which is not installed"
            raise ConfigError([Problem("optimizer.name", name, expected, f"pip install {package}")])
        found: type[Optimizer] = getattr(importlib.import_module(module), name)
        return found

    return load


def per_element(size: int, what: str) -> StateSizeOf:
    """A state of `size` bytes per trained element."""

    def state_size(tensors: Sequence[TrainedTensors], _options: Mapping[str, Any]) -> StateSize:
        return StateSize(size * elements(tensors), what)

    return state_size


def elements(tensors: Sequence[TrainedTensors]) -> int:
    return sum(tensor.elements for tensor in tensors)


def factored(tensors: Sequence[TrainedTensors]) -> int:
    """Bytes of factored second moments: one fp32 row and column per matrix; vectors keep them whole."""
    total = 0
    for tensor in tensors:
        if len(tensor.shape) < 2:
            total += 4 * tensor.elements
        else:
            *batch, rows, columns = tensor.shape
            total += 4 * math.prod(batch) * (rows + columns) * tensor.count
    return total
