"""Families that other installed packages bring: what a family's folder is, for those that are not in `models/`.

A distribution names its family in the entry point group `gracetune.families`: the entry point's name is the family's,
its value the package that is its folder. That package has the modules our own folders have, and in them the same names
(docs/extending.md lists them). The names are read once, when gracetune starts; a module is imported when something of
it is asked for, so that a package that cannot be imported stops nobody who does not use it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Protocol, runtime_checkable

from gracetune.errors import ConfigError, Problem

GROUP = "gracetune.families"


@runtime_checkable
class SaysItsFamily(Protocol):
    """A part that says whose it is: `SPEC`, `KEYS`, a footprint."""

    @property
    def family(self) -> str: ...


@dataclass(frozen=True)
class InstalledFamilies:
    points: tuple[EntryPoint, ...]
    ours: tuple[str, ...]
    """Names that are taken."""

    @property
    def names(self) -> tuple[str, ...]:
        """Without those that are ours too: such a one is refused as soon as it is asked for."""
        return tuple(dict.fromkeys(point.name for point in self.points if point.name not in self.ours))

    def has(self, family: str) -> bool:
        return any(point.name == family for point in self.points)

    def part(self, family: str, module: str, name: str) -> Any:
        """One name of one module of a family's package; refused if it says another family's name."""
        package = self._package(family)
        place = f"{package}.{module}"
        try:
            found = importlib.import_module(place)
        except Exception as error:  # the code of others, run for the first time: whatever it raises, they have to mend
            why = f"{place} cannot be imported: {type(error).__name__}: {error}"
            raise refused(family, why, f"a package with a module {module}") from error
        if not hasattr(found, name):
            raise refused(family, f"{place} without {name}", f"{name} in it")
        part = getattr(found, name)
        for one in part if isinstance(part, tuple | list) else (part,):
            if isinstance(one, SaysItsFamily):
                refuse_another_name(family, f"{place}.{name}", one)
        return part

    def _package(self, family: str) -> str:
        points = [point for point in self.points if point.name == family]
        if len(points) == 1 and family not in self.ours:
            return points[0].value
        by = [f"{point.value} ({point.dist.name if point.dist else 'unknown distribution'})" for point in points]
        where = ", ".join([*(["gracetune itself"] if family in self.ours else []), *by])
        raise refused(family, f"two families of this name: {where}", "one")


def refuse_another_name(family: str, place: str, part: SaysItsFamily) -> None:
    if part.family != family:
        expected = f"family={family!r} there, or an entry point called {part.family}"
        raise refused(family, f"family={part.family!r} in {place}", expected)


def refused(family: str, found: str, expected: str) -> ConfigError:
    hint = f"mend or `pip uninstall` the package whose entry point in {GROUP} is called {family} (docs/extending.md)"
    return ConfigError([Problem(f"the installed family {family}", found, expected, hint)])
