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
_T = TypeVar("_T")


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

    def state_tensors(self) -> list[Tensor]:
        """All state tensors on this rank, for measuring their memory."""
        ...

    def named_state(self) -> NamedState:
        """The state to save. Sharded state is gathered, so all ranks must call this."""
        ...

    def load_named_state(self, state: NamedState) -> None:
        """Load strictly: if names or shapes differ, raise `StateMismatchError` and change nothing."""
        ...


def key_of(name: str, entry: str) -> str:
    """The key of a parameter's state entry in `NamedState.tensors`. An entry contains no colon."""
    return f"{name}:{entry}"


def by_parameter(values: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    """Split the keys made by `key_of`: entries by parameter."""
    found: dict[str, dict[str, _T]] = {}
    for key, value in values.items():
        name, _, entry = key.rpartition(":")
        found.setdefault(name, {})[entry] = value
    return found


def differences(ours: Mapping[str, object], saved: Mapping[str, object]) -> str:
    """How saved keys and values differ from this run's, as a text; "" if they are equal."""
    missing = sorted(set(ours) - set(saved))
    unexpected = sorted(set(saved) - set(ours))
    changed = [
        f"{name} ({saved[name]} instead of {ours[name]})"
        for name in sorted(set(ours) & set(saved))
        if ours[name] != saved[name]
    ]
    lists = (("missing", missing), ("unexpected", unexpected), ("different", changed))
    return "\n".join(f"  {title} ({len(names)}): {_some(names)}" for title, names in lists if names)


def _some(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
