"""Save and load the state of any torch optimizer by parameter name.

Per parameter, tensors are saved as they are and everything else as plain data. Per group, only values that the
optimizer computes are saved, such as Prodigy's distance or the weight of a schedule-free average. Values that the
config decides are not saved, so a changed learning rate takes effect after a resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from gracetune.optim.arguments import constructor_arguments
from gracetune.optim.named_state import NamedState, StateMismatchError, by_parameter, differences, key_of

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
        wrong = f"  not ours ({len(extra)}): {', '.join(extra[:8])}"
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
