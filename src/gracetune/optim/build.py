"""Build the optimizer of a config, and save and load its state by parameter name.

groups = [ParamGroup("high_noise", "high_noise", attached.parameters()), ...]
optimizer = build_optimizer(config.optimizer, groups)
saved = named_state(optimizer, parameter_names(groups))
load_named_state(optimizer, parameter_names(groups), saved)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gracetune.config.run_config import Optimizer as OptimizerConfig
from gracetune.errors import ConfigError, Problem
from gracetune.optim.state import load_saved_state, saved_state
from gracetune.optim.arguments import arguments_of
from gracetune.optim.named_state import KeepsNamedState, NamedState
from gracetune.optim.record import ParamGroup, optimizer_record


def parameter_names(groups: Sequence[ParamGroup]) -> dict[str, Tensor]:
    """All parameters by a unique name.

    The group's name is the prefix, because both experts' layers have the same names.
    """
    names = [group.name for group in groups]
    if len(set(names)) != len(names):
        raise ValueError(f"two param groups have one name: {names}")
    return {
        f"{group.name}/{name}" if group.name else name: parameter
        for group in groups
        for name, parameter in group.parameters.items()
    }


def build_optimizer(config: OptimizerConfig, groups: Sequence[ParamGroup]) -> Optimizer:
    """Build the configured optimizer. ConfigError lists every setting that it does not take."""
    named = parameter_names(groups)
    parameters = [*named.values()]
    if not parameters:
        raise ValueError("nothing to train: the param groups are empty")
    cls = optimizer_record(config.name).load(parameters)
    arguments = arguments_of(config, cls, parameters)
    members = [_group(config, group, arguments) for group in groups if group.parameters]
    make: Any = cls
    try:
        # Some packages print remarks about their options; stdout is reserved for --json.
        with contextlib.redirect_stdout(sys.stderr):
            optimizer: Optimizer = make(members, **arguments)
    except (ValueError, TypeError) as error:
        given = ", ".join(f"{name}={value}" for name, value in arguments.items())
        hint = f"change what `optimizer` says: {error}"
        raise ConfigError([Problem("optimizer", given, f"values that {config.name} takes", hint)]) from error
    for group in optimizer.param_groups:
        if group["lr"] is None:  # Adafactor with relative_step ignores lr, but schedules and logs read it
            group["lr"] = 1.0
    return optimizer


def optimizer_notes(config: OptimizerConfig, groups: Sequence[ParamGroup] = ()) -> tuple[str, ...]:
    """Notes on settings that have no effect or an unexpected one. Show them once."""
    record = optimizer_record(config.name)
    notes = [
        f"optimizer.options.{name}: no effect, {why}"
        for name, why in record.no_effect.items()
        if name in config.options
    ]
    notes += record.notes(config, groups)
    return tuple(notes)


def _group(config: OptimizerConfig, group: ParamGroup, arguments: Mapping[str, Any]) -> dict[str, Any]:
    members = [*parameter_names([group]).items()]
    built: dict[str, Any] = {"params": members, "name": group.name, "stage": group.expert}
    if group.lr is not None and arguments["lr"] is not None:
        built["lr"] = group.lr
    return built | optimizer_record(config.name).group_arguments(config, group.expert)


# -- state by name -----------------------------------------------------------------------------------------------------


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """All state tensors of the optimizer, as this process holds them."""
    if isinstance(optimizer, KeepsNamedState):
        return optimizer.state_tensors()
    return [value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, Tensor)]


def named_state(optimizer: Optimizer, names: Mapping[str, Tensor]) -> NamedState:
    """The optimizer's state by the names of `parameter_names`.

    Sharded state is gathered, so all ranks must call this.
    """
    if isinstance(optimizer, KeepsNamedState):
        return optimizer.named_state()
    return saved_state(optimizer, names)


@torch.no_grad()
def load_named_state(optimizer: Optimizer, names: Mapping[str, Tensor], saved: NamedState) -> None:
    """Load strictly: if optimizer, names or shapes differ, raise `StateMismatchError` and change nothing."""
    if isinstance(optimizer, KeepsNamedState):
        optimizer.load_named_state(saved)
    else:
        load_saved_state(optimizer, names, saved)
