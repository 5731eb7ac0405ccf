"""Records found by name: ours from a table, those of other installed packages from an entry point group.

Both are entry points: a name, and `module:NAME` where the record is. Names are read once, when gracetune starts. A
record is imported when it is asked for, so a package that cannot be imported stops only the runs that use it, and
config can list what an upper folder defines without importing that folder.
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
    """One word for a record, used in messages: optimizer."""
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
        """Ours first; every name once."""
        return tuple(dict.fromkeys((*self.ours, *(point.name for point in self.installed))))

    def load_as(self, name: str, kind: type[T]) -> T:
        """The record, which has to be of this class or protocol."""
        record = self.load(name)
        if not isinstance(record, kind):
            raise self.rejected(name, repr(record), f"a record of the class {kind.__name__}")
        return record

    def load(self, name: str) -> Any:
        """The record. A name that two packages use (we count) is rejected, and so is one that cannot be imported."""
        if name not in self.names:
            raise KeyError(name)
        points = [point for point in self.installed if point.name == name]
        if name in self.ours and not points:
            return EntryPoint(name, self.ours[name], self.group).load()
        if len(points) != 1 or name in self.ours:
            raise self._two_of(name, points)
        try:
            return points[0].load()
        except Exception as error:  # the code of others, run for the first time: any error is theirs to fix
            found = f"{points[0].value} cannot be imported: {type(error).__name__}: {error}"
            raise self.rejected(name, found, "module:NAME, the record in a module of that package") from error

    def rejected(self, name: str, found: str, expected: str) -> ConfigError:
        hint = f"fix or `pip uninstall` the package whose entry point in {self.group} is called {name}"
        return ConfigError(
            [Problem(f"the installed {self.what} {name}", found, expected, f"{hint} (docs/extending.md)")]
        )

    def _two_of(self, name: str, points: list[EntryPoint]) -> ConfigError:
        by = [f"{point.value} ({point.dist.name if point.dist else 'unknown distribution'})" for point in points]
        where = ", ".join([*(["gracetune itself"] if name in self.ours else []), *by])
        return self.rejected(name, f"several called {name}: {where}", "one")
