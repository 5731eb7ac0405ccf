"""Finds model families by name: ours, and those of other installed packages.

A family is a Python package. Ours are the folders below `gracetune.models` that `_OURS` lists. Another distribution
adds one with an entry point in the group `gracetune.families`: its name is the family's name, its value the package.
Both kinds have the same modules with the same names in them (docs/extending.md lists them), and
`FamilyPackages.part` reads both.

Entry points are read once, when gracetune starts. A module is imported only when it is needed, so a broken package
stops only the runs that use it, and a config file is checked without importing torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import AfterValidator

from gracetune.config.family_names import FamilyNames, Flavour
from gracetune.config.registry import FOREIGN_ERRORS
from gracetune.errors import ConfigError, Problem

__all__ = ["FAMILIES", "GROUP", "PACKAGES", "Family", "FamilyPackages", "Flavour", "find_flavour", "flavours",
           "names_of", "readable_names", "reject_another_name"]  # fmt: skip

GROUP = "gracetune.families"
_OURS = ("wan", "qwen_image", "flux", "flux2", "sdxl", "z_image", "krea2", "stable_audio")
"""The folders below `gracetune.models`, in the order in which lists show them."""


@runtime_checkable
class HasFamily(Protocol):
    """A part of a package that names its family: `NAMES`, `SPEC`, `KEYS`, a footprint."""

    @property
    def family(self) -> str: ...


@dataclass(frozen=True)
class FamilyPackages:
    """The entry points of all families, and access to the modules of their packages."""

    ours: tuple[EntryPoint, ...]
    installed: tuple[EntryPoint, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Every name once, ours first. A name that two packages use is rejected when it is first looked up."""
        return tuple(dict.fromkeys(point.name for point in (*self.ours, *self.installed)))

    def is_installed(self, family: str) -> bool:
        """Whether another distribution provides this family."""
        return any(point.name == family for point in self.installed)

    def part(self, family: str, module: str, name: str) -> Any:
        """Return one attribute of one module of a family's package. Rejects a part that names another family."""
        module_name = f"{self._package(family)}.{module}"
        if not self.is_installed(family):
            return getattr(importlib.import_module(module_name), name)
        try:
            with redirect_stdout(sys.stderr):  # stdout is reserved for --json
                found = importlib.import_module(module_name)
        except FOREIGN_ERRORS as error:
            raise _unimportable(family, module_name, module, error) from error
        if not hasattr(found, name):
            raise rejected(family, f"{module_name} without {name}", f"{name} in it")
        part = getattr(found, name)
        for one in part if isinstance(part, tuple | list) else (part,):
            if isinstance(one, HasFamily):
                reject_another_name(family, f"{module_name}.{name}", one)
        return part

    def has_module(self, family: str, module: str) -> bool:
        """Whether a family's package has a module. This imports the package, but not the module."""
        package = self._package(family)
        try:
            return find_spec(f"{package}.{module}") is not None
        except ModuleNotFoundError as error:
            if error.name is not None and f"{package}.".startswith(f"{error.name}."):
                return False  # the package itself does not exist
            raise _unimportable(family, package, module, error) from error
        except FOREIGN_ERRORS as error:
            raise _unimportable(family, package, module, error) from error

    def folder(self, family: str) -> Path:
        """Return the folder of a family's package. This imports the package's parents, but not its modules."""
        package = self._package(family)
        found = find_spec(package)
        if found is None or found.origin is None:
            raise rejected(family, f"no package {package}", "an installed package")
        return Path(found.origin).parent

    def _package(self, family: str) -> str:
        points = [point for point in (*self.ours, *self.installed) if point.name == family]
        if len(points) == 1:
            return points[0].value
        taken = any(point.name == family for point in self.ours)
        by = [
            f"{point.value} ({point.dist.name if point.dist else 'unknown distribution'})"
            for point in self.installed
            if point.name == family
        ]
        location = ", ".join([*(["gracetune itself"] if taken else []), *by])
        raise rejected(family, f"two families of this name: {location}", "one")


def _unimportable(family: str, module_name: str, module: str, error: BaseException) -> ConfigError:
    why = f"{module_name} cannot be imported: {type(error).__name__}: {error}"
    return rejected(family, why, f"a package with a module {module}")


def reject_another_name(family: str, module_name: str, part: HasFamily) -> None:
    if part.family != family:
        expected = f"family={family!r} there, or an entry point called {part.family}"
        raise rejected(family, f"family={part.family!r} in {module_name}", expected)


def rejected(family: str, found: str, expected: str) -> ConfigError:
    hint = f"fix or `pip uninstall` the package whose entry point in {GROUP} is called {family} (docs/extending.md)"
    return ConfigError([Problem(f"the installed family {family}", found, expected, hint)])


PACKAGES = FamilyPackages(
    ours=tuple(EntryPoint(name, f"gracetune.models.{name}", GROUP) for name in _OURS),
    installed=tuple(entry_points(group=GROUP)),
)
FAMILIES: tuple[str, ...] = PACKAGES.names


@cache
def names_of(family: str) -> FamilyNames:
    """Return the names of a family and its parts in config files. An unknown family has no flavours."""
    if family not in FAMILIES:
        return FamilyNames(family, ())
    if not PACKAGES.has_module(family, "names") and PACKAGES.has_module(family, "flavours"):
        return FamilyNames(family, _flavours_alone(family))
    names: FamilyNames = PACKAGES.part(family, "names", "NAMES")
    if not isinstance(names, FamilyNames):
        raise rejected(family, f"NAMES = {names!r}", "a FamilyNames")
    _check_flavours(family, "NAMES.flavours", names.flavours)
    return names


def _flavours_alone(family: str) -> tuple[Flavour, ...]:
    """Read the flavours of a package without `names.py`: it has `flavours.py`, and no names in the peers' files."""
    found: tuple[Flavour, ...] = PACKAGES.part(family, "flavours", "FLAVOURS")
    _check_flavours(family, "FLAVOURS", found)
    return found


def _check_flavours(family: str, name: str, found: Any) -> None:
    if not (isinstance(found, tuple) and found and all(isinstance(one, Flavour) for one in found)):
        raise rejected(family, f"{name} = {found!r}", "a tuple of Flavour, at least one")


def readable_names() -> Iterator[FamilyNames]:
    """Yield the names of every family, and skip installed packages that are broken."""
    for family in FAMILIES:
        try:
            yield names_of(family)
        except ConfigError:
            if not PACKAGES.is_installed(family):
                raise


def flavours(family: str) -> tuple[Flavour, ...]:
    """Return every flavour of a family. The first is the default; an unknown family has none."""
    return names_of(family).flavours


def find_flavour(family: str, name: str) -> Flavour | None:
    return next((flavour for flavour in flavours(family) if flavour.name == name), None)


def _with_flavours(family: str) -> str:
    """Read the flavours now, so that `config check` reports a broken package, not a run after hours of caching."""
    flavours(family)
    return family


if TYPE_CHECKING:
    Family = str  # a type checker cannot know which packages are installed
else:
    Family = Annotated[Literal[FAMILIES], AfterValidator(_with_flavours)]
