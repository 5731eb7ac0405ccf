"""Build the optimizer of a config, and save and load its state by parameter name.

groups = [ParamGroup("high_noise", "high_noise", attached.parameters()), ...]
optimizer = build_optimizer(config.optimizer, groups)
saved = named_state(optimizer, parameter_names(groups))
load_named_state(optimizer, parameter_names(groups), saved)

Per parameter, tensors are saved as they are and everything else as plain data. Per group, only values that the
optimizer computes are saved, such as Prodigy's distance or the weight of a schedule-free average. Values that the
config decides are not saved, so a changed learning rate takes effect after a resume.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from gracetune.config.run_config import Optimizer as OptimizerConfig
from gracetune.config.run_config import OptimizerState
from gracetune.config.spelling import misspelt
from gracetune.errors import ConfigError, Problem
from gracetune.optim.chunked_adamw import RESIDENT, StateChoice
from gracetune.optim.named_state import (
    KeepsNamedState,
    NamedState,
    StateMismatchError,
    by_parameter,
    differences,
    key_of,
)
from gracetune.optim.record import Arguments, Load, OptimizerRecord, ParamGroup, optimizer_record


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


def build_optimizer(
    config: OptimizerConfig, groups: Sequence[ParamGroup], state: StateChoice | None = None
) -> Optimizer:  # fmt: skip
    """Build the configured optimizer. ConfigError lists every setting that it does not take.

    With `state` the optimizer keeps its state in chunks.
    """
    named = parameter_names(groups)
    parameters = [*named.values()]
    if not parameters:
        raise ValueError("nothing to train: the param groups are empty")
    record = optimizer_record(config.name)
    cls = (record.load if state is None else _chunked(config.name, record))(parameters)
    arguments = arguments_of(config, cls, parameters)
    if state is not None:
        arguments = {name: value for name, value in arguments.items() if name != "fused"} | {"state": state}
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


def _chunked(name: str, record: OptimizerRecord) -> Load:
    if record.load_chunked is None:
        problem = Problem("optimizer.name", name, "adamw, whose state can have a home", "--set optimizer.name=adamw")
        raise ConfigError([problem])
    return record.load_chunked


def state_choice(config: OptimizerState) -> StateChoice | None:
    """Where a full fine-tune's state is, as the config says; None if the optimizer keeps it beside fp32 weights."""
    if config.home == "auto":
        return None
    return StateChoice(config.precision, RESIDENT if config.home == "resident" else 0)


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


# -- constructor arguments ---------------------------------------------------------------------------------------------


_WITH_OWN_KEYS: Final = ("params", "lr", "weight_decay", "betas", "eps")
"""Arguments with config keys of their own; `options` does not list them."""


def constructor_arguments(cls: type[torch.optim.Optimizer]) -> tuple[str, ...]:
    """Names of the arguments that the constructor of `cls` declares."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name for p in parameters if p.name != "self" and p.kind not in variadic)


def arguments_of(config: OptimizerConfig, cls: type[torch.optim.Optimizer], parameters: Sequence[Tensor]) -> Arguments:
    """Constructor arguments from the config. Raises one ConfigError that lists every argument `cls` does not take."""
    record, takes = optimizer_record(config.name), constructor_arguments(cls)
    settings = {"weight_decay": config.weight_decay, "betas": config.betas, "eps": config.eps}
    given = {name: value for name, value in settings.items() if value is not None}
    free = [name for name in takes if name not in ("params", "lr", *record.hidden, *record.in_section)]
    # `free` holds what `options` may set: neither hidden arguments nor those with config keys of their own.
    problems = [
        Problem(f"optimizer.{name}", str(value), f"nothing: {config.name} takes {', '.join(free)}", f"remove `{name}`")
        for name, value in given.items()
        if name not in takes
    ]
    options = {}
    for name, value in config.options.items():
        if name in record.no_effect and all(parameter.dtype == torch.float32 for parameter in parameters):
            continue
        if name not in free:
            problems.append(_unknown(config, name, value, record, free))
        elif name in given:
            problems.append(_twice(name, value, given[name]))
        else:
            options[name] = tuple(value) if isinstance(value, list) else value
    if problems:
        raise ConfigError(problems)
    return record.prepare({"lr": config.lr, **given, **options}, parameters)


def _unknown(config: OptimizerConfig, name: str, value: Any, record: OptimizerRecord, free: Sequence[str]) -> Problem:
    key = f"optimizer.options.{name}"
    section = record.in_section.get(name)
    if section is not None:
        return Problem(key, str(value), f"optimizer.{section}.{name}", f"write it in `{section}`: {{{name}: {value}}}")
    others = [option for option in free if option not in _WITH_OWN_KEYS]
    expected = f"an option of {config.name}: {', '.join(others)}"
    return Problem(key, str(value), expected, misspelt(name, others, write="{}"))


def _twice(name: str, value: Any, other: Any) -> Problem:
    found = f"{value}, and {other} in optimizer.{name}"
    return Problem(f"optimizer.options.{name}", found, "one of the two", f"remove `{name}` from `options`")


# -- the state of any torch optimizer ----------------------------------------------------------------------------------


_REMEDY = "resume with the adapter and optimizer the state was saved with, or start anew (--resume none)"
_NOT_STATE = ("params", "param_names", "name", "stage", "initial_lr", "swap_tensors")
"""Group entries that the config or torch sets when the optimizer is built."""


def saved_state(optimizer: Optimizer, names: Mapping[str, Tensor]) -> NamedState:
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, parameter in names.items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[key_of(name, entry)] = _whole(value)
            else:
                values[key_of(name, entry)] = _plain(value)
    return NamedState(
        tensors,
        {
            "optimizer": type(optimizer).__name__,
            "parameters": {name: list(parameter.shape) for name, parameter in names.items()},
            "values": values,
            "groups": [
                {"name": group.get("name", str(at)), "values": _computed_values(optimizer, group)}
                for at, group in enumerate(optimizer.param_groups)
            ],
        },
    )


def load_saved_state(optimizer: Optimizer, names: Mapping[str, Tensor], saved: NamedState) -> None:
    _check(optimizer, names, saved)
    values = by_parameter(saved.json["values"])
    tensors = by_parameter(saved.tensors)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    for group, saved_group in zip(optimizer.param_groups, saved.json["groups"], strict=True):
        device = group["params"][0].device
        group.update({key: _revived(value, device) for key, value in saved_group["values"].items()})
        own = {id(parameter) for parameter in group["params"]}
        for name, parameter in names.items():
            if id(parameter) in own and (name in tensors or name in values):
                entries = {entry: _placed(entry, t, parameter, group) for entry, t in tensors.get(name, {}).items()}
                entries |= {entry: _revived(value, device) for entry, value in values.get(name, {}).items()}
                optimizer.state[parameter] = entries


def _check(optimizer: Optimizer, names: Mapping[str, Tensor], saved: NamedState) -> None:
    ours, theirs = type(optimizer).__name__, saved.json.get("optimizer")
    if ours != theirs:
        raise StateMismatchError(f"this is the state of {theirs!r}, not of {ours!r}; {_REMEDY}")
    wanted = {name: list(parameter.shape) for name, parameter in names.items()}
    wrong = differences(wanted, saved.json["parameters"])
    groups = [group.get("name", str(at)) for at, group in enumerate(optimizer.param_groups)]
    if not wrong and groups != [group["name"] for group in saved.json["groups"]]:
        wrong = f"  groups: {[group['name'] for group in saved.json['groups']]} instead of {groups}"
    extra = sorted({*by_parameter(saved.tensors), *by_parameter(saved.json["values"])} - {*names})
    if not wrong and extra:
        wrong = f"  unexpected ({len(extra)}): {', '.join(extra[:8])}"
    if wrong:
        raise StateMismatchError(f"this optimizer state is of other parameters:\n{wrong}\n{_REMEDY}")


def _computed_values(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    configured = {*constructor_arguments(type(optimizer)), *_NOT_STATE}
    return {key: _plain(value) for key, value in group.items() if key not in configured}


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.detach().clone()


def _placed(entry: str, value: Tensor, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """A saved tensor on the device, and with the sharding, that the optimizer expects."""
    # torch keeps `step` on the host unless a fused or capturable update reads it on the device.
    on_host = entry == "step" and not (group.get("fused") or group.get("capturable"))
    value = value.to("cpu" if on_host else parameter.device, copy=True)
    if isinstance(parameter, DTensor) and value.shape == parameter.shape and entry != "step":
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value


def _plain(value: Any) -> Any:
    """`value` as JSON data that `_revived` turns back into the same type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [_plain(item) for item in value]}
    raise TypeError(f"an optimizer keeps a {type(value).__name__}, which cannot be saved as plain data")


def _revived(value: Any, device: torch.device) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]), device=device)
    ((kind, items),) = value.items()
    return {"tuple": tuple, "list": list}[kind](_revived(item, device) for item in items)
