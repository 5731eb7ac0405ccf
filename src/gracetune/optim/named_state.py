"""Optimizer state by parameter name, and how two sets of names differ.

torch restores optimizer state by position, which can assign the state of one expert to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from gracetune.errors import GracetuneError

_SHOWN = 8
T = TypeVar("T")


class StateMismatchError(GracetuneError):
    """Saved state belongs to other parameters or to another optimizer. Nothing was changed."""


@dataclass(frozen=True, eq=False)
class NamedState:
    """The whole state of an optimizer: `tensors` by `parameter:entry`, everything else as plain data in `json`."""

    tensors: Mapping[str, Tensor]
    json: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class KeepsNamedState(Protocol):
    """An optimizer that saves and loads its own state by parameter name. `optim.build` does it for all others."""

    def state_tensors(self) -> list[Tensor]: ...

    def named_state(self) -> NamedState: ...

    def load_named_state(self, state: NamedState) -> None: ...


def key_of(name: str, entry: str) -> str:
    return f"{name}:{entry}"


def by_parameter(tensors: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Split the keys made by `key_of`: entries by parameter."""
    found: dict[str, dict[str, T]] = {}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition(":")
        found.setdefault(name, {})[entry] = tensor
    return found


def differences(wanted: Mapping[str, object], found: Mapping[str, object]) -> str:
    """A text that lists missing, extra and changed keys; "" if both mappings are equal."""
    missing = sorted(set(wanted) - set(found))
    extra = sorted(set(found) - set(wanted))
    changed = [
        f"{name} ({found[name]} instead of {wanted[name]})"
        for name in sorted(set(wanted) & set(found))
        if wanted[name] != found[name]
    ]
    lists = (("missing", missing), ("not ours", extra), ("different", changed))
    return "\n".join(f"  {title} ({len(names)}): {_some(names)}" for title, names in lists if names)


def _some(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
