"""Finds records by name: ours from a table, those of other installed packages from an entry point group.

Both are entry points: a name, and the record's location as `module:NAME`. Names are read once, when gracetune starts. A
record is imported only when it is needed, so a broken package stops only the runs that use it, and `config` can list
what a higher layer defines without importing it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from gracetune.errors import ConfigError, Problem

T = TypeVar("T")


@dataclass(frozen=True)
class Registry:
    what: str
    """The kind of record in messages, such as `optimizer`."""
    group: str
    """The entry point group that other packages use."""
    ours: Mapping[str, str]
    """Name -> `module:NAME`."""
    installed: tuple[EntryPoint, ...]

    @classmethod
    def find(cls, what: str, group: str, ours: Mapping[str, str]) -> Registry:
        return cls(what, group, ours, tuple(entry_points(group=group)))

    @property
    def names(self) -> tuple[str, ...]:
        """Every name once, ours first."""
        return tuple(dict.fromkeys((*self.ours, *(point.name for point in self.installed))))

    def load_as(self, name: str, kind: type[T]) -> T:
        """Load a record and check that it is of this class or protocol."""
        record = self.load(name)
        if not isinstance(record, kind):
            raise self.rejected(name, repr(record), f"a record of the class {kind.__name__}")
        return record

    def load(self, name: str) -> Any:
        """Load a record. Raises ConfigError if it cannot be imported, or if two packages use its name."""
        if name not in self.names:
            raise KeyError(name)
        self.check_unique(name)
        if name in self.ours:
            return EntryPoint(name, self.ours[name], self.group).load()
        (point,) = self._points(name)
        try:
            return point.load()
        except Exception as error:  # importing runs another project's code: any error is theirs to fix
            found = f"{point.value} cannot be imported: {type(error).__name__}: {error}"
            raise self.rejected(name, found, "module:NAME, the record in a module of that package") from error

    def check_unique(self, name: str) -> None:
        """Raise ConfigError if two packages use this name. Nothing is imported."""
        points = self._points(name)
        if len(points) + (name in self.ours) > 1:
            by = [f"{point.value} ({point.dist.name if point.dist else 'unknown distribution'})" for point in points]
            location = ", ".join([*(["gracetune itself"] if name in self.ours else []), *by])
            raise self.rejected(name, f"several called {name}: {location}", "one")

    def _points(self, name: str) -> list[EntryPoint]:
        return [point for point in self.installed if point.name == name]

    def rejected(self, name: str, found: str, expected: str) -> ConfigError:
        hint = f"fix or `pip uninstall` the package whose entry point in {self.group} is called {name}"
        return ConfigError(
            [Problem(f"the installed {self.what} {name}", found, expected, f"{hint} (docs/extending.md)")]
        )
