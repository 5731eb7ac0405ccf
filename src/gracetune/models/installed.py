"""One kind of part for every family: our own, listed, and those of installed packages, imported when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from gracetune.config.families import INSTALLED
from gracetune.config.installed_families import InstalledFamilies

Part = TypeVar("Part")


class WithInstalled(Mapping[str, Part]):
    """Family -> part, in the order of `config.families`. Of an installed one it is `name` in its `module`."""

    def __init__(
        self, ours: Mapping[str, Part], module: str, name: str, installed: InstalledFamilies = INSTALLED
    ) -> None:
        self._ours, self._module, self._name, self._installed = ours, module, name, installed

    def __getitem__(self, family: str) -> Part:
        if not self._installed.has(family):
            return self._ours[family]
        part: Part = self._installed.part(family, self._module, self._name)
        return part

    def __contains__(self, family: object) -> bool:
        return family in self._ours or family in self._installed.names

    def __iter__(self) -> Iterator[str]:
        yield from self._ours
        yield from self._installed.names

    def __len__(self) -> int:
        return len(self._ours) + len(self._installed.names)
