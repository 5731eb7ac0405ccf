"""The optimizers that `optimizer.name` can name. Their records are in `optim/optimizers/`, one file each.

The layer order forbids `config` to import `optim`, so records are found by name. They do not import torch, which keeps
`config check` fast.
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
    """The attribute of an optimizer's record that config reads (`gracetune.optim.record.OptimizerRecord`)."""

    @property
    def own_keys(self) -> tuple[str, ...]: ...


def reads_key(optimizer: str, key: str) -> bool:
    """Whether this optimizer reads `key`, a key of the `optimizer` section that only some optimizers read."""
    return key in _record(optimizer).own_keys


def _record(name: str) -> KnowsOwnKeys:
    found: KnowsOwnKeys = OPTIMIZERS.load_as(name, KnowsOwnKeys)  # type: ignore[type-abstract]
    return found


def _importable(name: str) -> str:
    """Load the record now, so that `config check` reports a broken package."""
    _record(name)
    return name


if TYPE_CHECKING:
    OptimizerName = str  # a type checker cannot know which packages are installed
else:
    OptimizerName = Annotated[Literal[OPTIMIZER_NAMES], AfterValidator(_importable)]
