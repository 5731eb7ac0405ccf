"""Facts about the code of an upstream (SimpleTuner or ai-toolkit): names, parameters, lines. They are recorded as JSON,
so checks need no upstream code.

A facts file holds `{"facts": 1, "upstream", "version", "origin", "looked_for": [...], "modules": {FILE: MODULE},
"unreadable": {FILE: REASON}}` with a MODULE `{"definitions": {NAME: {"kind", "line", "parameters", "bases", "calls"}},
"imports": {NAME: LINE}, "commit"}`. It contains no source text. `looked_for` lists the points (`points.py`) that were
searched for: a point that is listed there but has no definition in `modules` did not exist upstream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import Signature
from pathlib import Path
from typing import Any

from gracetune.errors import GracetuneError
from gracetune.integrations.signatures import parameters_text, parse
from gracetune.storage.atomic import write_file

FORMAT = 1
LAZY = "__getattr__"
"""A module with this function provides names lazily."""


class FactsError(GracetuneError):
    """A facts file cannot be used."""


class DefinitionKind(StrEnum):
    CLASS = "class"
    FUNCTION = "function"
    ASYNC_FUNCTION = "async function"
    PROPERTY = "property"
    VALUE = "value"


@dataclass(frozen=True)
class Definition:
    kind: DefinitionKind
    line: int | None
    """None if the line is unknown."""
    signature: Signature | None = None
    bases: tuple[str, ...] = ()
    """Names of a class's bases, as written."""
    calls: Mapping[str, int] = field(default_factory=dict)
    """Searched calls in a function's body -> line of the first one."""


@dataclass(frozen=True)
class UpstreamModule:
    definitions: Mapping[str, Definition]
    """Definitions by qualified name."""
    imports: Mapping[str, int | None] = field(default_factory=dict)
    """Names imported at top level -> line."""
    commit: str | None = None
    """The commit of this file, if files of several commits were recorded."""


@dataclass(frozen=True)
class UpstreamFacts:
    upstream: str
    version: str | None
    """None if the code does not state it."""
    origin: str
    """A description of the source of the code, for messages."""
    modules: Mapping[str, UpstreamModule]
    """Modules by file, relative to upstream's root, with slashes."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """File -> why it could not be read or parsed."""
    looked_for: frozenset[str] | None = None
    """`Point.location` of all points that were searched for; None for facts made from the whole code, which are not
    written to a file before they are narrowed to points (`narrow_facts` in `survey.py`)."""


def file_names(module: str) -> tuple[str, str]:
    """The two possible files of a dotted module name."""
    stem = module.replace(".", "/")
    return f"{stem}.py", f"{stem}/__init__.py"


def same_name(file: str, module: str) -> bool:
    """Whether a file could be that module, moved to another folder."""
    return file.rpartition("/")[2] == f"{module.rpartition('.')[2]}.py"


def write_facts(facts: UpstreamFacts, file: Path) -> None:
    write_file(file, f"{json.dumps(as_json(facts), indent=1, ensure_ascii=False)}\n".encode())


def read_facts(file: Path) -> UpstreamFacts:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise FactsError(f"{file}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise FactsError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("facts") != FORMAT:
        raise FactsError(
            f"{file}: not a facts file of format {FORMAT}: record it again with scripts/upstream_status.py"
        )
    try:
        return _from_json(value)
    except (KeyError, TypeError, ValueError, AttributeError, GracetuneError) as error:
        raise FactsError(f"{file}: damaged facts: {type(error).__name__}: {error}") from error


def as_json(facts: UpstreamFacts) -> dict[str, Any]:
    return {
        "facts": FORMAT,
        "upstream": facts.upstream,
        "version": facts.version,
        "origin": facts.origin,
        "looked_for": sorted(facts.looked_for or ()),
        "modules": {file: _module_json(facts.modules[file]) for file in sorted(facts.modules)},
        "unreadable": dict(sorted(facts.unreadable.items())),
    }


def _module_json(module: UpstreamModule) -> dict[str, Any]:
    value: dict[str, Any] = {
        "definitions": {name: _definition_json(one) for name, one in sorted(module.definitions.items())}
    }
    if module.imports:
        value["imports"] = dict(sorted(module.imports.items()))
    if module.commit:
        value["commit"] = module.commit
    return value


def _definition_json(one: Definition) -> dict[str, Any]:
    value: dict[str, Any] = {"kind": str(one.kind), "line": one.line}
    if one.signature is not None:
        value["parameters"] = parameters_text(one.signature)
    if one.bases:
        value["bases"] = list(one.bases)
    if one.calls:
        value["calls"] = dict(sorted(one.calls.items()))
    return value


def _from_json(value: dict[str, Any]) -> UpstreamFacts:
    return UpstreamFacts(
        upstream=str(value["upstream"]),
        version=None if value["version"] is None else str(value["version"]),
        origin=str(value["origin"]),
        modules={str(file): _module(one) for file, one in value["modules"].items()},
        unreadable={str(file): str(reason) for file, reason in value["unreadable"].items()},
        looked_for=frozenset(str(one) for one in value["looked_for"]),
    )


def _module(value: dict[str, Any]) -> UpstreamModule:
    return UpstreamModule(
        {str(name): _definition(one) for name, one in value["definitions"].items()},
        {str(name): _line(at) for name, at in value.get("imports", {}).items()},
        value.get("commit"),
    )


def _definition(value: dict[str, Any]) -> Definition:
    return Definition(
        kind=DefinitionKind(value["kind"]),
        line=_line(value["line"]),
        signature=parse(value["parameters"]) if "parameters" in value else None,
        bases=tuple(str(one) for one in value.get("bases", ())),
        calls={str(name): int(at) for name, at in value.get("calls", {}).items()},
    )


def _line(value: Any) -> int | None:
    return None if value is None else int(value)
