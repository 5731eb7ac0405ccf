"""What we lean on in an upstream, as data: each point is one name there, why we need it, and how it is called."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from inspect import Signature

from gracetune.integrations.signatures import parse


@dataclass(frozen=True)
class Point:
    """One place in an upstream that a feature of ours holds on to."""

    name: str
    needed_for: str
    module: str
    """Where the name is expected, dotted, as it is imported."""
    target: str = ""
    """The qualified name in that module; empty where the module itself is the point."""
    parameters: str | None = None
    """Those we rely on, as in a `def`; an upstream that still takes every such call has not changed for us."""
    calls: tuple[str, ...] = ()
    """What the target's body calls, in this order; empty where only the target itself counts."""
    imported: bool = False
    """The module has the name from elsewhere, and calls it by it."""
    needed: bool = True
    """Whether the overlay cannot do without; the others are only worth knowing about."""

    @property
    def location(self) -> str:
        """As a hook names its target, and with the calls where they are the point."""
        target_path = f"{self.module}:{self.target}" if self.target else self.module
        return f"{target_path} -> {', '.join(self.calls)}" if self.calls else target_path

    @cached_property
    def signature(self) -> Signature | None:
        return None if self.parameters is None else parse(self.parameters)

    @property
    def owner(self) -> str:
        """The class of a method; empty for what stands in the module."""
        return self.target.rpartition(".")[0]


@dataclass(frozen=True)
class Upstream:
    """One program that we attach to: how its code is recognised, and every point we care about in it."""

    name: str
    title: str
    distribution: str
    """Its name among installed distributions."""
    inside: tuple[str, ...]
    """Where its root may lie in what a user points at; the empty one is the folder itself."""
    marks: tuple[str, ...]
    """Folders that its root has, and hardly anything else's."""
    surveyed: tuple[str, ...]
    """The folders of its root that hold its code: a checkout has much else beside it."""
    version_in: tuple[tuple[str, str], ...]
    """Files and the variable in them that say the version, for code without metadata."""
    how_to_get: str
    points: tuple[Point, ...]
