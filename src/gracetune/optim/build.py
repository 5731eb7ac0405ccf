"""From the `optimizer` section of a config to an optimizer, and its state by parameter name.

groups = [ParamGroup("high_noise", "high_noise", attached.parameters()), ...]
optimizer = build_optimizer(config.optimizer, groups)
saved = named_state(optimizer, parameter_names(groups))
load_named_state(optimizer, parameter_names(groups), saved)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gracetune.adapters.state import Stage
from gracetune.config.run_config import AutomagicLimits
from gracetune.config.run_config import Optimizer as Asked
from gracetune.errors import ConfigError, Problem
from gracetune.optim import state
from gracetune.optim.automagic import Automagic
from gracetune.optim.kinds import KINDS, arguments_of
from gracetune.optim.naming import NamedState
from gracetune.optim.rates import Limits, RateGrid

_LIMITS = ("lr_bump", "min_lr", "max_lr")


@dataclass(frozen=True, eq=False)
class ParamGroup:
    """What is trained together: mostly one expert's adapter."""

    name: str
    """Its own among the groups; the same in every run."""
    stage: Stage
    parameters: Mapping[str, Tensor]
    lr: float | None = None
    """None: the config's."""


def parameter_names(groups: Sequence[ParamGroup]) -> dict[str, Tensor]:
    """All parameters by a name that no two have: both experts' layers are called alike."""
    names = [group.name for group in groups]
    if len(set(names)) != len(names):
        raise ValueError(f"two param groups have one name: {names}")
    return {
        f"{group.name}/{name}" if group.name else name: parameter
        for group in groups
        for name, parameter in group.parameters.items()
    }


def build_optimizer(asked: Asked, groups: Sequence[ParamGroup]) -> Optimizer:
    """What the config asks for and its optimizer cannot take is refused; all of it at once."""
    named = parameter_names(groups)
    parameters = [*named.values()]
    if not parameters:
        raise ValueError("nothing to train: the param groups are empty")
    cls = KINDS[asked.name].load(parameters)
    arguments = arguments_of(asked, cls, parameters)
    members = [_group(asked, group, arguments) for group in groups if group.parameters]
    make: Any = cls
    try:
        # Some packages print what they think of their options; stdout belongs to --json.
        with contextlib.redirect_stdout(sys.stderr):
            optimizer: Optimizer = make(members, **arguments)
    except (ValueError, TypeError) as error:
        given = ", ".join(f"{name}={value}" for name, value in arguments.items())
        hint = f"change what `optimizer` says: {error}"
        raise ConfigError([Problem("optimizer", given, f"values that {asked.name} takes", hint)]) from error
    for group in optimizer.param_groups:
        if group["lr"] is None:  # Adafactor with relative_step: it never reads it, but schedules and logs do
            group["lr"] = 1.0
    return optimizer


def optimizer_notes(asked: Asked, groups: Sequence[ParamGroup] = ()) -> tuple[str, ...]:
    """What of the config means something else than it may seem; to be shown once."""
    notes = [
        f"optimizer.options.{name}: no effect, {why}"
        for name, why in KINDS[asked.name].no_effect.items()
        if name in asked.options
    ]
    if asked.name.startswith("prodigy") and asked.lr < 0.1:
        notes.append(f"optimizer.lr: {asked.name} finds its own rate and multiplies it by lr, {asked.lr:g}; 1 is usual")
    if asked.name == "adafactor" and asked.options.get("relative_step"):
        notes.append("optimizer.lr: not used, relative_step makes Adafactor set its own rate")
    if asked.name == "automagic":
        stages = {group.stage for group in groups}
        for stage, limits in (("high_noise", asked.high_noise), ("low_noise", asked.low_noise)):
            if groups and limits != AutomagicLimits() and stage not in stages:
                notes.append(f"optimizer.{stage}: not used, that expert is not trained")
        for group in groups:
            notes += _start_note(asked, group)
    return tuple(notes)


def _start_note(asked: Asked, group: ParamGroup) -> list[str]:
    limits, lr = _limits(asked, group.stage), asked.lr if group.lr is None else group.lr
    if lr == 0 or limits.min_lr <= lr <= limits.max_lr:
        return []
    nearer = limits.min_lr if lr < limits.min_lr else limits.max_lr
    where = f" of {group.name}" if group.name else ""
    return [f"optimizer.lr{where}: {lr:g} is outside min_lr and max_lr; rates start at {nearer:g}"]


def _group(asked: Asked, group: ParamGroup, arguments: Mapping[str, Any]) -> dict[str, Any]:
    members = [*parameter_names([group]).items()]
    made: dict[str, Any] = {"params": members, "name": group.name, "stage": group.stage}
    if group.lr is not None and arguments["lr"] is not None:
        made["lr"] = group.lr
    if asked.name == "automagic":
        limits = _limits(asked, group.stage)
        made |= dict(zip(_LIMITS, _values(limits), strict=True))
    return made


def _values(limits: Limits) -> tuple[float, float, float]:
    return limits.lr_bump, limits.min_lr, limits.max_lr


def _limits(asked: Asked, stage: Stage) -> Limits:
    """An expert's own limits, else those of all, else Automagic's."""
    own = {"high_noise": asked.high_noise, "low_noise": asked.low_noise}.get(stage, AutomagicLimits())
    default = Limits()
    chosen = [
        first if first is not None else second if second is not None else last
        for first, second, last in zip(
            (own.lr_bump, own.min_lr, own.max_lr),
            (asked.limits.lr_bump, asked.limits.min_lr, asked.limits.max_lr),
            _values(default),
            strict=True,
        )
    ]
    key = f"optimizer.{stage or 'limits'}"
    try:
        limits = Limits(*chosen)
        RateGrid.of(limits)
    except ValueError as error:
        found = ", ".join(f"{name} {value:g}" for name, value in zip(_LIMITS, chosen, strict=True))
        expected = "min_lr at most max_lr, and max_lr at most a billion bumps"
        hint = f"set the others too (unset ones are {', '.join(f'{value:g}' for value in _values(default))})"
        raise ConfigError([Problem(key, found, expected, hint)]) from error
    return limits


# -- state by name ----------------------------------------------------------------------------------------------------


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """All that the optimizer keeps beside the parameters, as this process holds it."""
    if isinstance(optimizer, Automagic):
        return optimizer.state_tensors()
    return [one for kept in optimizer.state.values() for one in kept.values() if isinstance(one, Tensor)]


def named_state(optimizer: Optimizer, names: Mapping[str, Tensor]) -> NamedState:
    """Everything the optimizer keeps, by the names of `parameter_names`; sharded state is gathered on all ranks."""
    if isinstance(optimizer, Automagic):
        return optimizer.named_state()
    return state.named_state(optimizer, names)


@torch.no_grad()
def load_named_state(optimizer: Optimizer, names: Mapping[str, Tensor], saved: NamedState) -> None:
    """Strict: the same optimizer, names and shapes, or `StateMismatchError` with lists, and nothing is changed."""
    if isinstance(optimizer, Automagic):
        optimizer.load_named_state(saved)
    else:
        state.load_named_state(optimizer, names, saved)
