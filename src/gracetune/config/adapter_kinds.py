"""The adapter algorithms that `adapter.kind` can name. Their records are in `adapters/algorithms/`, one file each.

The layer order forbids `config` to import `adapters`, so records are found by name. They do not import torch, which
keeps `config check` fast. Another package adds an algorithm with an entry point in the group `gracetune.adapters`: the
entry point's name is the value of `adapter.kind`, and the object it points to is the record.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final, Literal, Protocol, runtime_checkable

from pydantic import AfterValidator

from gracetune.config.registry import Registry
from gracetune.errors import ConfigError

FULL_FINETUNE: Final = "full_finetune"
"""The `adapter.kind` that trains the weights themselves, without an adapter. No algorithm can have this name."""
ALGORITHMS: Final[Registry] = Registry.find(
    "adapter algorithm",
    "gracetune.adapters",
    {  # Order matters: a later algorithm may have all tensors of an earlier one, so files are matched from the end.
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
    """The attributes of a record that config reads. `adapters.algorithms.record.Algorithm` documents them."""

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
    """Return every usable record, in the order of `ALGORITHM_NAMES`."""
    found = []
    for name in ALGORITHM_NAMES:
        with suppress(ConfigError):
            found.append(checked_record(name))
    return tuple(found)


def by_lycoris_name() -> dict[str, str]:
    """Map LyCORIS' names of the algorithms, as in its files and in `adapter.by_module`, to ours."""
    records = reversed(algorithms())  # ours come first in the list, and so win where two share a LyCORIS name
    return {record.lycoris_name: record.name for record in records if record.lycoris_name is not None}


def checked_record(name: str) -> AdapterAlgorithm:
    """Load a record by name. Raises ConfigError if an installed package's record is broken or has another name."""
    found: AdapterAlgorithm = ALGORITHMS.load_as(name, AdapterAlgorithm)  # type: ignore[type-abstract]
    if found.name != name:
        raise ALGORITHMS.rejected(name, f"an algorithm called {found.name}", f"name = {name!r} in its class")
    return found


def _with_record(kind: str) -> str:
    """Load the record now, so that `config check` reports a broken package, not a run after hours of caching."""
    if kind != FULL_FINETUNE:
        checked_record(kind)
    return kind


if TYPE_CHECKING:
    AdapterKind = str  # a type checker cannot know which packages are installed
else:
    AdapterKind = Annotated[Literal[(*ALGORITHM_NAMES, FULL_FINETUNE)], AfterValidator(_with_record)]
