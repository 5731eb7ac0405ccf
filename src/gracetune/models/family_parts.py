"""One attribute from each family's package, imported on first access. Covers our families and installed packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from gracetune.config.families import PACKAGES, FamilyPackages

Part = TypeVar("Part")


class FamilyParts(Mapping[str, Part]):
    """A mapping from family to the attribute `name` of its submodule `module`, in the order of `config.families`."""

    def __init__(self, module: str, name: str, packages: FamilyPackages = PACKAGES) -> None:
        self._module, self._name, self._packages = module, name, packages

    def __getitem__(self, family: str) -> Part:
        if family not in self:
            raise KeyError(family)
        part: Part = self._packages.part(family, self._module, self._name)
        return part

    def __contains__(self, family: object) -> bool:
        return family in self._packages.names

    def __iter__(self) -> Iterator[str]:
        yield from self._packages.names

    def __len__(self) -> int:
        return len(self._packages.names)
