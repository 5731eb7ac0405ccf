"""Names of dataset backends: our own, and those of other installed packages.

A package adds a backend with an entry point in the group `gracetune.backends`. The entry point's name is the value of a
dataset's `type`; its target is the record (`module:NAME`, a `gracetune.data.backends.record.DatasetBackend`). A
backend's options are in a section of the dataset with the same name, as those of `in_memory` are, and the record's own
pydantic model validates them.
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
        "in_memory": "gracetune.data.staging.stager:BACKEND",
        "url": "gracetune.data.backends.url:BACKEND",
    },
)


@runtime_checkable
class TakesOptions(Protocol):
    """The attributes of a backend's record that config reads."""

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
    """Whether another package provides this backend."""
    return name in BACKENDS.names and name not in BACKENDS.ours


def validated(name: str, given: Mapping[str, Any]) -> tuple[BaseModel | None, list[InvalidOption]]:
    """Validate a dataset's options with the model of an installed backend.

    Returns the validated options, or None and what is wrong with them. Raises ConfigError if the package does not
    provide a backend of this name.
    """
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
    BackendName = str  # a type checker cannot know which packages are installed
else:
    BackendName = Annotated[Literal[BACKENDS.names], AfterValidator(_unique)]
