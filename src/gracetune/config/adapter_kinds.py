"""What a config knows of the adapter algorithms: their names, and the options that are one algorithm's own.

Their records are in `adapters/algorithms`, above this folder. They are found by name, as families are, and import no
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import AfterValidator

_REGISTRY: Any = importlib.import_module("gracetune.adapters.algorithms.registry")
FULL_FINETUNE: str = _REGISTRY.FULL_FINETUNE


class AdapterAlgorithm(Protocol):
    """The part of a record that a config reads (`adapters.algorithms.record.Algorithm` describes it)."""

    @property
    def name(self) -> str: ...

    @property
    def lycoris_name(self) -> str | None: ...

    @property
    def own_options(self) -> tuple[str, ...]: ...

    @property
    def rank_is_width(self) -> bool: ...


def algorithms() -> tuple[AdapterAlgorithm, ...]:
    found: tuple[AdapterAlgorithm, ...] = _REGISTRY.algorithms()
    return found


def by_lycoris_name() -> dict[str, str]:
    """LyCORIS' names of the algorithms, as in its files and in `adapter.by_module`, and ours."""
    return {record.lycoris_name: record.name for record in algorithms() if record.lycoris_name is not None}


def _with_record(kind: str) -> str:
    """A package that cannot be used is named by `config check` already, and not after hours of caching."""
    if kind != FULL_FINETUNE:
        _REGISTRY.algorithm(kind)
    return kind


if TYPE_CHECKING:
    AdapterKind = str  # what is installed is not known to a type checker
else:
    AdapterKind = Annotated[Literal[(*_REGISTRY.NAMES, FULL_FINETUNE)], AfterValidator(_with_record)]
