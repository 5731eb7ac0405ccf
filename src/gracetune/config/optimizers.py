"""The optimizers a config can name. The records themselves are in `optim/optimizers/`, one file each.

Config is below `optim`, so it finds a record by name. Records import no torch; `config check` stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal, Protocol, runtime_checkable

from pydantic import AfterValidator

from gracetune.config.registry import Registry

OPTIMIZERS: Final[Registry] = Registry.find(
    "optimizer",
    "gracetune.optimizers",
    {
        "adamw": "gracetune.optim.optimizers.adamw:RECORD",
        "adamw_8bit": "gracetune.optim.optimizers.adamw_8bit:RECORD",
        "adafactor": "gracetune.optim.optimizers.adafactor:RECORD",
        "torch_adafactor": "gracetune.optim.optimizers.torch_adafactor:RECORD",
        "lion": "gracetune.optim.optimizers.lion:RECORD",
        "prodigy": "gracetune.optim.optimizers.prodigy:RECORD",
        "prodigy_plus_schedule_free": "gracetune.optim.optimizers.prodigy_plus_schedule_free:RECORD",
        "automagic": "gracetune.optim.optimizers.automagic:RECORD",
    },
)
OPTIMIZER_NAMES: Final[tuple[str, ...]] = OPTIMIZERS.names


@runtime_checkable
class KnowsOwnKeys(Protocol):
    """What config reads of a record (`gracetune.optim.record.OptimizerRecord`)."""

    @property
    def own_keys(self) -> tuple[str, ...]: ...


def reads_key(optimizer: str, key: str) -> bool:
    """Whether this optimizer reads a key of the `optimizer` section that not every optimizer reads."""
    return key in _record(optimizer).own_keys


def _record(name: str) -> KnowsOwnKeys:
    found: KnowsOwnKeys = OPTIMIZERS.load_as(name, KnowsOwnKeys)  # type: ignore[type-abstract]
    return found


def _importable(name: str) -> str:
    """`config check` already names a package that is broken, not only a run."""
    _record(name)
    return name


if TYPE_CHECKING:
    OptimizerName = str  # what is installed is not known to a type checker
else:
    OptimizerName = Annotated[Literal[OPTIMIZER_NAMES], AfterValidator(_importable)]
