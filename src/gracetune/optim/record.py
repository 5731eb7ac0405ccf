"""One record per optimizer: how it is built, what of a config it reads, what it keeps in memory, what to note.

The records are in `optim/optimizers/`; `config/optimizers.py` lists them. Configs are checked before torch is imported,
so this module and the records import it only inside functions.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from gracetune.config.optimizers import OPTIMIZERS
from gracetune.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from gracetune.adapters.state import ExpertStage
    from gracetune.config.run_config import Optimizer as OptimizerConfig

Arguments = dict[str, Any]
"""Of an optimizer's constructor."""


@dataclass(frozen=True, eq=False)
class ParamGroup:
    """What is trained together: mostly one expert's adapter."""

    name: str
    """Its own among the groups; the same in every run."""
    expert: ExpertStage
    parameters: Mapping[str, Tensor]
    lr: float | None = None
    """None: the config's."""


class TrainedTensors(Protocol):
    """Equal trained tensors: their shape, and how many there are."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def count(self) -> int: ...

    @property
    def elements(self) -> int:
        """Of all of them."""
        ...


@dataclass(frozen=True)
class StateSize:
    """Bytes an optimizer keeps, and the sentence that says of what."""

    bytes: int
    why: str


Load = Callable[[Sequence["Tensor"]], type["Optimizer"]]
StateSizeOf = Callable[[Sequence[TrainedTensors], Mapping[str, Any]], StateSize]
"""From what is trained and `optimizer.options`."""


def _as_they_are(arguments: Arguments, parameters: Sequence[Tensor]) -> Arguments:
    return arguments


def _nothing(config: OptimizerConfig, expert: ExpertStage) -> Arguments:
    return {}


def _no_notes(config: OptimizerConfig, groups: Sequence[ParamGroup]) -> list[str]:
    return []


@dataclass(frozen=True)
class OptimizerRecord:
    load: Load
    """Its class. Rejects a config where the package or the device is missing. The class's constructor says which
    `options` there are."""
    state_size: StateSizeOf
    """What the memory plan counts."""
    prepare: Callable[[Arguments, Sequence[Tensor]], Arguments] = _as_they_are
    """Last changes to the constructor's arguments."""
    hidden: tuple[str, ...] = ()
    """Constructor arguments that `options` may not set: something else decides them."""
    no_effect: Mapping[str, str] = field(default_factory=dict)
    """Options that other programs' optimizers of this name take, and why they change nothing here."""
    own_keys: tuple[str, ...] = ()
    """Keys of the `optimizer` section that only some optimizers read, and this one does."""
    in_section: Mapping[str, str] = field(default_factory=dict)
    """Hidden constructor arguments -> the key of the `optimizer` section that sets them."""
    group_arguments: Callable[[OptimizerConfig, ExpertStage], Arguments] = _nothing
    """Arguments that differ between param groups."""
    constant_rate: str = ""
    """Why it follows no learning-rate schedule; empty if it does."""
    notes: Callable[[OptimizerConfig, Sequence[ParamGroup]], list[str]] = _no_notes
    """What of the config means something else than it may seem."""


def optimizer_record(name: str) -> OptimizerRecord:
    return OPTIMIZERS.load_as(name, OptimizerRecord)


def optimizer_state(tensors: Sequence[TrainedTensors], config: OptimizerConfig) -> StateSize:
    """What the optimizer that a config asks for keeps of these tensors."""
    return optimizer_record(config.name).state_size(tensors, config.options)


# -- parts that several records are made of ---------------------------------------------------------------------------


def class_of(class_path: str, package: str = "") -> Load:
    """The class at `module:Name`; `package` is what to install where an optional one is missing."""
    module, _, name = class_path.partition(":")

    def load(parameters: Sequence[Tensor]) -> type[Optimizer]:
        if package and importlib.util.find_spec(module.partition(".")[0]) is None:
            expected = f"the package {package}, which is not installed"
            raise ConfigError([Problem("optimizer.name", name, expected, f"pip install {package}")])
        found: type[Optimizer] = getattr(importlib.import_module(module), name)
        return found

    return load


def per_element(size: int, what: str) -> StateSizeOf:
    """As many bytes for every trained element."""

    def state_size(tensors: Sequence[TrainedTensors], _options: Mapping[str, Any]) -> StateSize:
        return StateSize(size * elements(tensors), what)

    return state_size


def elements(tensors: Sequence[TrainedTensors]) -> int:
    return sum(tensor.elements for tensor in tensors)


def factored(tensors: Sequence[TrainedTensors]) -> int:
    """Second moments kept as one row and one column of each matrix, in fp32; vectors keep them whole."""
    total = 0
    for tensor in tensors:
        if len(tensor.shape) < 2:
            total += 4 * tensor.elements
        else:
            *batch, rows, columns = tensor.shape
            total += 4 * math.prod(batch) * (rows + columns) * tensor.count
    return total
