"""The adapter algorithms a config can name. The records themselves are in `adapters/algorithms/`, one file each.

Config is below `adapters`, so it finds a record by name. Records import no torch; `config check` stays fast. Another
package brings an algorithm by an entry point of the group `gracetune.adapters`: its name is what `adapter.kind` says,
its value the record.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final, Literal, Protocol, runtime_checkable

from pydantic import AfterValidator

from gracetune.config.registry import Registry
from gracetune.errors import ConfigError

FULL_FINETUNE: Final = "full_finetune"
"""The kind that is no adapter: the weights themselves are trained. No algorithm may be called so."""
ALGORITHMS: Final[Registry] = Registry.find(
    "adapter algorithm",
    "gracetune.adapters",
    {  # A later one may have the tensors of an earlier one and more: what a file holds is looked up from the end.
        "lora": "gracetune.adapters.algorithms.lora:ALGORITHM",
        "dora": "gracetune.adapters.algorithms.dora:ALGORITHM",
        "lokr": "gracetune.adapters.algorithms.lokr:ALGORITHM",
        "loha": "gracetune.adapters.algorithms.loha:ALGORITHM",
        "locon": "gracetune.adapters.algorithms.locon:ALGORITHM",
        "ia3": "gracetune.adapters.algorithms.ia3:ALGORITHM",
        "diag_oft": "gracetune.adapters.algorithms.diag_oft:ALGORITHM",
        "full_delta": "gracetune.adapters.algorithms.full_delta:ALGORITHM",
    },
)
ALGORITHM_NAMES: Final[tuple[str, ...]] = tuple(name for name in ALGORITHMS.names if name != FULL_FINETUNE)


@runtime_checkable
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

    @property
    def loadable(self) -> bool: ...


def algorithms() -> tuple[AdapterAlgorithm, ...]:
    """Every record, in the order of the names. One that cannot be used is left out."""
    found = []
    for name in ALGORITHM_NAMES:
        with suppress(ConfigError):
            found.append(checked_record(name))
    return tuple(found)


def by_lycoris_name() -> dict[str, str]:
    """LyCORIS' names of the algorithms, as in its files and in `adapter.by_module`, and ours."""
    known = reversed(algorithms())  # where two have one name, ours counts
    return {record.lycoris_name: record.name for record in known if record.lycoris_name is not None}


def checked_record(name: str) -> AdapterAlgorithm:
    """ConfigError where a package of others does not bring what it promises."""
    found: AdapterAlgorithm = ALGORITHMS.load_as(name, AdapterAlgorithm)  # type: ignore[type-abstract]
    if found.name != name:
        raise ALGORITHMS.rejected(name, f"an algorithm called {found.name}", f"name = {name!r} in its class")
    return found


def _with_record(kind: str) -> str:
    """A package that cannot be used is named by `config check` already, and not after hours of caching."""
    if kind != FULL_FINETUNE:
        checked_record(kind)
    return kind


if TYPE_CHECKING:
    AdapterKind = str  # what is installed is not known to a type checker
else:
    AdapterKind = Annotated[Literal[(*ALGORITHM_NAMES, FULL_FINETUNE)], AfterValidator(_with_record)]
