"""Names of dataset backends: our own, and those that other installed packages bring.

A distribution names its backend in the entry point group `gracetune.backends`: the entry point's name is what a config
writes as a dataset's `type`, its value the record (`module:NAME`, a `gracetune.data.backends.record.DatasetBackend`).
The options of a backend stand in a dataset's section of the same name, as those of `in_memory` do, and are checked by
the record's own pydantic model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol, runtime_checkable

from pydantic import AfterValidator, BaseModel, ValidationError

from gracetune.config.registry import Registry

GROUP: Final = "gracetune.backends"
BACKENDS: Final[Registry] = Registry.find(
    "dataset backend",
    GROUP,
    {
        "local": "gracetune.data.backends.local:BACKEND",
        "in_memory": "gracetune.data.staging.backend:BACKEND",
        "url": "gracetune.data.backends.url:BACKEND",
    },
)


@runtime_checkable
class TakesOptions(Protocol):
    """What a config has to know of a backend."""

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> type[BaseModel] | None: ...


@dataclass(frozen=True)
class InvalidOption:
    path: tuple[str | int, ...]
    found: Any
    expected: str


def is_installed(name: str) -> bool:
    """Whether a package of others brings this backend."""
    return name in BACKENDS.names and name not in BACKENDS.ours


def validated(name: str, given: Mapping[str, Any]) -> tuple[BaseModel | None, list[InvalidOption]]:
    """A dataset's options as the model of an installed backend has them; or what is wrong with them. ConfigError where
    its package brings no backend of this name."""
    record: TakesOptions = BACKENDS.load_as(name, TakesOptions)  # type: ignore[type-abstract]
    if record.name != name:
        raise BACKENDS.rejected(name, f"a backend called {record.name}", f"a DatasetBackend called {name}")
    if record.options is None:
        unknown = [InvalidOption((key,), given[key], "nothing: this backend takes no options") for key in given]
        return None, unknown
    try:
        return record.options.model_validate(dict(given)), []
    except ValidationError as error:
        return None, [InvalidOption(one["loc"], one["input"], one["msg"]) for one in error.errors()]


def _unique(name: str) -> str:
    BACKENDS.check_unique(name)
    return name


if TYPE_CHECKING:
    BackendName = str  # what is installed is not known to a type checker
else:
    BackendName = Annotated[Literal[BACKENDS.names], AfterValidator(_unique)]
