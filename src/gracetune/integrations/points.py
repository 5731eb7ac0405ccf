"""The names we depend on in an upstream, as data: each point is one name, why we need it, and how it is called."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from inspect import Signature

from gracetune.integrations.signatures import parse


@dataclass(frozen=True)
class Point:
    """One name in an upstream that a feature of ours depends on."""

    name: str
    needed_for: str
    module: str
    """The dotted module that should have the name."""
    target: str = ""
    """The qualified name in that module; empty if the module itself is the point."""
    parameters: str | None = None
    """The parameters we rely on, as in a `def`. A signature that still accepts every such call has not changed for
    us."""
    calls: tuple[str, ...] = ()
    """Calls that the target's body must make, in this order; empty if only the target matters."""
    imported: bool = False
    """The module imports the name and uses it under this name."""
    needed: bool = True
    """Whether the overlay needs it. Other points are only informative."""

    @property
    def location(self) -> str:
        """The target as a hook writes it, followed by the calls if there are any."""
        target_path = f"{self.module}:{self.target}" if self.target else self.module
        return f"{target_path} -> {', '.join(self.calls)}" if self.calls else target_path

    @cached_property
    def signature(self) -> Signature | None:
        return None if self.parameters is None else parse(self.parameters)

    @property
    def owner(self) -> str:
        """The class of a method; empty for names at module level."""
        return self.target.rpartition(".")[0]


@dataclass(frozen=True)
class Upstream:
    """An upstream program: how to recognize its code, and the points to check."""

    name: str
    title: str
    distribution: str
    """The name of its Python distribution."""
    inside: tuple[str, ...]
    """Possible paths of its root below the folder that a user names; "" is the folder itself."""
    marks: tuple[str, ...]
    """Folders that identify its root."""
    surveyed: tuple[str, ...]
    """Folders of the root that contain its code; a checkout contains much else."""
    version_in: tuple[tuple[str, str], ...]
    """(file, variable) pairs that hold the version, for code without metadata."""
    how_to_get: str
    points: tuple[Point, ...]
