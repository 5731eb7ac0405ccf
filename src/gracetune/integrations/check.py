"""Check an upstream for the names our overlay needs: present, moved, changed or missing, with file and line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gracetune.integrations.facts import (
    LAZY,
    Definition,
    DefinitionKind,
    FactsError,
    UpstreamFacts,
    file_names,
    same_name,
)
from gracetune.integrations.points import Point
from gracetune.integrations.signatures import differences


class Status(StrEnum):
    PRESENT = "present"
    MOVED = "moved"
    CHANGED = "changed signature"
    MISSING = "missing"


@dataclass(frozen=True)
class Finding:
    """The result for one point."""

    point: Point
    status: Status
    file: str | None = None
    line: int | None = None
    detail: str = ""
    reachable: bool = True
    """Whether a hook can still import it from the expected place."""

    @property
    def breaks(self) -> bool:
        """Whether the overlay cannot work with this upstream: a needed point changed, is missing, or is out of
        reach.
        """
        return self.point.needed and (self.status in (Status.CHANGED, Status.MISSING) or not self.reachable)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.point.name,
            "status": str(self.status),
            "file": self.file,
            "line": self.line,
            "needed_for": self.point.needed_for,
            "needed": self.point.needed,
            "expected": self.point.location,
            "reachable": self.reachable,
            "detail": self.detail,
        }


@dataclass(frozen=True)
class UpstreamReport:
    upstream: str
    version: str | None
    origin: str
    findings: tuple[Finding, ...]
    unreadable: tuple[tuple[str, str], ...] = ()

    @property
    def ok(self) -> bool:
        return not any(one.breaks for one in self.findings)

    def count(self, status: Status) -> int:
        return sum(one.status is status for one in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {
            "upstream": self.upstream,
            "version": self.version,
            "points": [one.as_json() for one in self.findings],
            "ok": self.ok,
            "source": self.origin,
            "unreadable": dict(self.unreadable),
        }


def check(facts: UpstreamFacts, points: Iterable[Point]) -> UpstreamReport:
    """Look up every point in the facts about an upstream."""
    points = tuple(points)
    if facts.looked_for is not None:
        unknown = [point.location for point in points if point.location not in facts.looked_for]
        if unknown:
            raise FactsError(
                f"{facts.origin}: recorded before these were looked for: {', '.join(unknown)}; record it again"
            )
    findings = tuple(_finding(facts, point) for point in points)
    return UpstreamReport(
        facts.upstream, facts.version, facts.origin, findings, tuple(sorted(facts.unreadable.items()))
    )


# -- parts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Location:
    file: str
    name: str
    definition: Definition

    def __str__(self) -> str:
        return f"{self.name} in {self.file}"


def _finding(facts: UpstreamFacts, point: Point) -> Finding:
    broken = [file for file in file_names(point.module) if file in facts.unreadable]
    if broken:
        reason = facts.unreadable[broken[0]]
        return Finding(point, Status.MISSING, broken[0], None, f"the file cannot be read as Python: {reason}", False)
    if not point.target:
        return _module_finding(facts, point)
    home = _home(facts, point)
    if point.imported:
        return _import_finding(facts, point, home)
    locations = list(_locations(facts, point, home))
    if not locations:
        return Finding(
            point, Status.MISSING, home, _owner_line(facts, point, home), _remains(facts, point, home), False
        )
    location_found = locations[0]
    moved = location_found.file != home or location_found.name != point.target
    reachable = not moved or _reachable(facts, point, home, location_found)
    location = _moved_to(location_found, locations[1:], home, reachable=reachable) if moved else ""
    changes = _changes(point, location_found.definition)
    if changes:
        detail = "; ".join([*changes, location] if location else changes)
        return Finding(point, Status.CHANGED, location_found.file, location_found.definition.line, detail, reachable)
    if point.calls:
        return _call_finding(facts, point, location_found, location, reachable=reachable)
    status = Status.MOVED if moved else Status.PRESENT
    return Finding(point, status, location_found.file, location_found.definition.line, location, reachable)


def _module_finding(facts: UpstreamFacts, point: Point) -> Finding:
    home = _home(facts, point)
    if home is not None:
        return Finding(point, Status.PRESENT, home, 1)
    others = sorted(file for file in facts.modules if same_name(file, point.module))
    if not others:
        return Finding(point, Status.MISSING, None, None, "no such module", False)
    return Finding(point, Status.MOVED, others[0], 1, f"a module of that name is {', '.join(others)}", False)


def _import_finding(facts: UpstreamFacts, point: Point, home: str | None) -> Finding:
    if home is None:
        return Finding(point, Status.MISSING, None, None, f"no module {point.module}", False)
    module = facts.modules[home]
    if point.target in module.imports:
        return Finding(point, Status.PRESENT, home, module.imports[point.target])
    if point.target in module.definitions:
        return Finding(point, Status.PRESENT, home, module.definitions[point.target].line)
    if LAZY in module.definitions:
        below = home.rpartition("/")[0]
        for file, other in sorted(facts.modules.items()):
            if file.startswith(f"{below}/") and point.target in other.definitions:
                return Finding(point, Status.PRESENT, file, other.definitions[point.target].line)
    return Finding(point, Status.MISSING, home, None, f"the module has no {point.target}", False)


def _home(facts: UpstreamFacts, point: Point) -> str | None:
    """The file of the module that should have the point, if it exists."""
    return next((file for file in file_names(point.module) if file in facts.modules), None)


def _locations(facts: UpstreamFacts, point: Point, home: str | None) -> Iterator[_Location]:
    """Places of the target, most likely first: its module, base classes of its class, then other modules."""
    files = [*([home] if home is not None else []), *(file for file in _by_likeness(facts, point) if file != home)]
    for file in files:
        definitions = facts.modules[file].definitions
        if point.target in definitions:
            yield _Location(file, point.target, definitions[point.target])
        elif point.owner in definitions:
            yield from _inherited(facts, file, point)


def _by_likeness(facts: UpstreamFacts, point: Point) -> list[str]:
    return sorted(facts.modules, key=lambda file: (not same_name(file, point.module), file))


def _inherited(facts: UpstreamFacts, file: str, point: Point) -> Iterator[_Location]:
    """Definitions in the base classes of the point's class, breadth first. The same file is searched before others."""
    leaf = point.target.rpartition(".")[2]
    waiting = [(file, base) for base in facts.modules[file].definitions[point.owner].bases]
    seen: set[str] = set()
    while waiting:
        near, base = waiting.pop(0)
        if base in seen:
            continue
        seen.add(base)
        for one in (near, *sorted(facts.modules)):
            definitions = facts.modules[one].definitions
            if base not in definitions:
                continue
            name = f"{base}.{leaf}"
            if name in definitions:
                yield _Location(one, name, definitions[name])
                return
            waiting += [(one, more) for more in definitions[base].bases]
            break


def _reachable(facts: UpstreamFacts, point: Point, home: str | None, location_found: _Location) -> bool:
    """Whether the expected module still provides the name: by import, by inheritance or under another name."""
    if home is None:
        return False
    module, first = facts.modules[home], point.target.partition(".")[0]
    if first in module.imports:
        return True
    if first not in module.definitions:
        return False
    if module.definitions[first].kind is DefinitionKind.VALUE:  # an alias of the moved name
        return True
    return point.owner in module.definitions and location_found in _inherited(facts, home, point)


def _moved_to(location_found: _Location, others: list[_Location], home: str | None, *, reachable: bool) -> str:
    text = f"now {location_found}"
    if others:
        text += f" (also {', '.join(str(one) for one in others)})"
    if reachable:
        return f"{text}, still to be had from {home}"
    return f"{text}, and no longer where the overlay looks for it"


def _changes(point: Point, found: Definition) -> list[str]:
    if point.signature is None:
        return []
    if found.kind is not DefinitionKind.FUNCTION or found.signature is None:
        return [f"is {_article(found.kind)} now"]
    return list(differences(point.signature, found.signature))


def _article(kind: DefinitionKind) -> str:
    return f"an {kind}" if kind is DefinitionKind.ASYNC_FUNCTION else f"a {kind}"


def _call_finding(
    facts: UpstreamFacts, point: Point, location_found: _Location, location: str, *, reachable: bool
) -> Finding:
    made = location_found.definition.calls
    if all(call in made for call in point.calls):
        line = made[point.calls[-1]]
        lines = [made[call] for call in point.calls]
        if lines != sorted(lines):
            calls = ", ".join(f"{call} on line {at}" for call, at in zip(point.calls, lines, strict=True))
            detail = f"the calls come in another order: {calls}"
            return Finding(point, Status.CHANGED, location_found.file, line, detail, reachable)
        return Finding(
            point, Status.MOVED if location else Status.PRESENT, location_found.file, line, location, reachable
        )
    gone = ", ".join(call for call in point.calls if call not in made)
    for name, other in facts.modules[location_found.file].definitions.items():
        if name.rpartition(".")[0] == point.owner and all(call in other.calls for call in point.calls):
            line = other.calls[point.calls[-1]]
            return Finding(point, Status.MOVED, location_found.file, line, f"{name} calls {gone} now", reachable)
    detail = f"{point.target} is there and does not call {gone}"
    return Finding(point, Status.MISSING, location_found.file, location_found.definition.line, detail, False)


def _owner_line(facts: UpstreamFacts, point: Point, home: str | None) -> int | None:
    if home is None or point.owner not in facts.modules[home].definitions:
        return None
    return facts.modules[home].definitions[point.owner].line


def _remains(facts: UpstreamFacts, point: Point, home: str | None) -> str:
    if home is None:
        return f"no module {point.module}, and no {point.target} anywhere else"
    if point.owner in facts.modules[home].definitions:
        return f"class {point.owner} is there without it"
    return f"the module is there, and {point.target} is nowhere"
