"""Our Automagic (`optim/automagic.py`): a learning rate per element, with limits per expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gracetune.config.run_config import AutomagicLimits
from gracetune.errors import ConfigError, Problem
from gracetune.optim.record import (
    Arguments,
    OptimizerRecord,
    ParamGroup,
    StateSize,
    TrainedTensors,
    class_of,
    elements,
    factored,
)

if TYPE_CHECKING:
    from gracetune.adapters.state import ExpertStage
    from gracetune.config.run_config import Optimizer as OptimizerConfig
    from gracetune.optim.element_rates import RateLimits

_LIMITS = ("lr_bump", "min_lr", "max_lr")


def _state_size(tensors: Sequence[TrainedTensors], options: Mapping[str, Any]) -> StateSize:
    size = 8 if options.get("rates") == "upstream" else 16
    what = f"{size}-bit rate and sign per element, second moment factored"
    return StateSize(factored(tensors) + (size // 8 + 1) * elements(tensors), what)


def _group_arguments(config: OptimizerConfig, expert: ExpertStage) -> Arguments:
    return dict(zip(_LIMITS, _values(_limits(config, expert)), strict=True))


def _notes(config: OptimizerConfig, groups: Sequence[ParamGroup]) -> list[str]:
    notes = []
    experts = {group.expert for group in groups}
    for expert, limits in (("high_noise", config.high_noise), ("low_noise", config.low_noise)):
        if groups and limits != AutomagicLimits() and expert not in experts:
            notes.append(f"optimizer.{expert}: not used, that expert is not trained")
    for group in groups:
        notes += _start_note(config, group)
    return notes


def _start_note(config: OptimizerConfig, group: ParamGroup) -> list[str]:
    """A note if `lr`, where the rates start, is outside the limits of the group."""
    limits, lr = _limits(config, group.expert), config.lr if group.lr is None else group.lr
    if lr == 0 or limits.min_lr <= lr <= limits.max_lr:
        return []
    nearer = limits.min_lr if lr < limits.min_lr else limits.max_lr
    location = f" of {group.name}" if group.name else ""
    return [f"optimizer.lr{location}: {lr:g} is outside min_lr and max_lr; rates start at {nearer:g}"]


def _values(limits: RateLimits) -> tuple[float, float, float]:
    return limits.lr_bump, limits.min_lr, limits.max_lr


def _limits(config: OptimizerConfig, expert: ExpertStage) -> RateLimits:
    """The limits of the expert; unset ones come from `optimizer.limits`, then from Automagic's defaults."""
    from gracetune.optim.element_rates import RateGrid, RateLimits

    own = {"high_noise": config.high_noise, "low_noise": config.low_noise}.get(expert, AutomagicLimits())
    default = RateLimits()
    chosen = [
        first if first is not None else second if second is not None else last
        for first, second, last in zip(
            (own.lr_bump, own.min_lr, own.max_lr),
            (config.limits.lr_bump, config.limits.min_lr, config.limits.max_lr),
            _values(default),
            strict=True,
        )
    ]
    key = f"optimizer.{expert or 'limits'}"
    try:
        limits = RateLimits(*chosen)
        RateGrid.of(limits)
    except ValueError as error:
        found = ", ".join(f"{name} {value:g}" for name, value in zip(_LIMITS, chosen, strict=True))
        expected = "min_lr at most max_lr, and max_lr at most a billion bumps"
        hint = f"set the others too (unset ones are {', '.join(f'{value:g}' for value in _values(default))})"
        raise ConfigError([Problem(key, found, expected, hint)]) from error
    return limits


RECORD = OptimizerRecord(
    load=class_of("gracetune.optim.automagic:Automagic"),
    state_size=_state_size,
    own_keys=("limits", "high_noise", "low_noise", "rates_from"),
    in_section=dict.fromkeys(_LIMITS, "limits"),
    group_arguments=_group_arguments,
    constant_rate="every element has a learning rate of its own, and `lr` is where it starts",
    notes=_notes,
)
