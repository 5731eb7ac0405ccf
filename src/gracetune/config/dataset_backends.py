"""Names of dataset backends: our own, and those that other installed packages bring.

A distribution names its backend in the entry point group `gracetune.backends`: the entry point's name is what a config
writes as a dataset's `type`, its value the record (`module:NAME`, a `gracetune.data.backends.record.DatasetBackend`).
The options of a backend stand in a dataset's section of the same name, as those of `in_memory` do, and are checked by
the record's own pydantic model. Names are read once, when gracetune starts; a record is imported when a dataset has its
type, so that a package that cannot be imported stops nobody who does not use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ValidationError

from gracetune.errors import ConfigError, Problem

GROUP = "gracetune.backends"
OURS = ("local", "in_memory", "url")


@runtime_checkable
class TakesOptions(Protocol):
    """What a config has to know of a backend."""

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> type[BaseModel] | None: ...


@dataclass(frozen=True)
class InstalledBackends:
    points: tuple[EntryPoint, ...]
    ours: tuple[str, ...] = OURS
    """Names that are taken."""

    @property
    def names(self) -> tuple[str, ...]:
        """Without those that are ours too: such a one is never used."""
        return tuple(dict.fromkeys(point.name for point in self.points if point.name not in self.ours))

    def has(self, name: str) -> bool:
        return name in self.names

    def load(self, name: str) -> TakesOptions:
        """The record of an installed backend. ConfigError where its package does not bring one."""
        points = [point for point in self.points if point.name == name]
        if len(points) > 1:
            by = ", ".join(f"{one.value} ({one.dist.name if one.dist else 'unknown distribution'})" for one in points)
            raise refused(name, f"two backends of this name: {by}", "one")
        try:
            found = points[0].load()
        except Exception as error:  # the code of others, run for the first time: whatever it raises, they have to fix
            why = f"{points[0].value} cannot be imported: {type(error).__name__}: {error}"
            raise refused(name, why, "a module with a DatasetBackend") from error
        if not isinstance(found, TakesOptions) or found.name != name:
            raise refused(name, f"{points[0].value} = {found!r}", f"a DatasetBackend called {name}")
        return found

    def validated(self, name: str, given: Mapping[str, Any]) -> tuple[BaseModel | None, list[InvalidOption]]:
        """A dataset's options as the backend's own model has them; or what is wrong with them."""
        model = self.load(name).options
        if model is None:
            unknown = [InvalidOption((key,), given[key], "nothing: this backend takes no options") for key in given]
            return None, unknown
        try:
            return model.model_validate(dict(given)), []
        except ValidationError as error:
            return None, [InvalidOption(one["loc"], one["input"], one["msg"]) for one in error.errors()]


@dataclass(frozen=True)
class InvalidOption:
    path: tuple[str | int, ...]
    found: Any
    expected: str


def refused(name: str, found: str, expected: str) -> ConfigError:
    hint = f"fix or `pip uninstall` the package whose entry point in {GROUP} is called {name} (docs/extending.md)"
    return ConfigError([Problem(f"the installed dataset backend {name}", found, expected, hint)])


INSTALLED = InstalledBackends(tuple(entry_points(group=GROUP)))

if TYPE_CHECKING:
    BackendName = str  # what is installed is not known to a type checker
else:
    BackendName = Literal[(*OURS, *INSTALLED.names)]
