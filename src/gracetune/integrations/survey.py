"""Collect facts from an upstream's syntax trees: definitions, their parameters and lines. Nothing is imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gracetune.integrations.facts import (
    LAZY,
    Definition,
    DefinitionKind,
    UpstreamFacts,
    UpstreamModule,
    file_names,
    same_name,
)
from gracetune.integrations.points import Point, Upstream
from gracetune.integrations.signatures import of_arguments
from gracetune.integrations.trees import Tree, version_of

PROPERTIES = frozenset({"property", "cached_property"})
NOT_A_DEFINITION = frozenset({"overload", "setter", "deleter"})
"""Decorators of a `def` that only extends another one of the same name."""


@dataclass(frozen=True)
class SurveyRequest:
    """The functions to read in detail.

    Reading signatures and calls of all functions would take several times as long.
    """

    names: frozenset[str]
    """Functions whose parameters to read, by the last part of their name."""
    callers: frozenset[str]
    """Classes whose methods' calls to read."""
    calls: frozenset[str]
    """Calls to look for, by dotted ending."""

    @classmethod
    def by(cls, points: Iterable[Point]) -> SurveyRequest:
        points = tuple(points)
        return cls(
            names=frozenset(point.target.rpartition(".")[2] for point in points),
            callers=frozenset(point.owner for point in points if point.calls),
            calls=frozenset(call for point in points for call in point.calls),
        )


def survey(tree: Tree, upstream: Upstream, origin: str) -> UpstreamFacts:
    """All definitions in upstream's code. Files that are not valid Python are listed with the reason."""
    wanted = SurveyRequest.by(upstream.points)
    modules: dict[str, UpstreamModule] = {}
    unreadable: dict[str, str] = {}
    for file in _python_files(tree, upstream):
        try:
            modules[file] = read_module(tree.read(file), wanted)
        except OSError as error:
            unreadable[file] = str(error.strerror or error)
        except SyntaxError as error:
            unreadable[file] = _syntax_error(error)
        except (ValueError, RecursionError) as error:
            unreadable[file] = str(error)
    return UpstreamFacts(upstream.name, version_of(tree, upstream), origin, modules, unreadable)


def read_module(source: bytes, wanted: SurveyRequest) -> UpstreamModule:
    """The facts about one module. Raises what `ast.parse` raises."""
    body = ast.parse(source).body
    definitions = dict(_definitions(body, "", wanted))
    return UpstreamModule(definitions, dict(_imported(body)))


def narrow_facts(facts: UpstreamFacts, points: Iterable[Point]) -> UpstreamFacts:
    """Reduce facts to what a check of these points reads, so that they are small enough to commit."""
    points = tuple(points)
    names = _names(facts, points)
    callers = {point.owner for point in points if point.calls}
    homes = {file for point in points for file in file_names(point.module)}
    modules = {}
    for file, module in facts.modules.items():
        kept = {
            name: one
            for name, one in module.definitions.items()
            if name in names or (one.calls and name.rpartition(".")[0] in callers) or (name == LAZY and file in homes)
        }
        bound = {point.target.partition(".")[0] for point in points if file in file_names(point.module)}
        imports = {name: at for name, at in module.imports.items() if name in bound}
        if kept or any(_counts(file, point) for point in points):
            modules[file] = UpstreamModule(kept, imports, module.commit)
    unreadable = {
        file: reason for file, reason in facts.unreadable.items() if any(_counts(file, point) for point in points)
    }
    looked_for = frozenset(point.location for point in points)
    return replace(facts, modules=modules, unreadable=unreadable, looked_for=looked_for)


# -- parts ------------------------------------------------------------------------------------------------------------


def _syntax_error(error: SyntaxError) -> str:
    """The error with our Python version, since upstream may be written for a newer one."""
    location = f"line {error.lineno}: " if error.lineno else ""
    return f"{location}{error.msg} (to Python {sys.version_info.major}.{sys.version_info.minor})"


def _python_files(tree: Tree, upstream: Upstream) -> Iterator[str]:
    for folder in upstream.surveyed:
        yield from (file for file in tree.files(folder) if file.endswith(".py"))


def _definitions(body: Iterable[ast.stmt], prefix: str, wanted: SurveyRequest) -> Iterator[tuple[str, Definition]]:
    """Definitions in file order, so that the last one of a name wins, as at run time."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {_last_name(one) for one in statement.decorator_list}
            if not decorators & NOT_A_DEFINITION:
                yield prefix + statement.name, _function(statement, decorators, prefix, wanted)
        elif isinstance(statement, ast.ClassDef):
            bases = tuple(_last_name(base) for base in statement.bases)
            yield prefix + statement.name, Definition(DefinitionKind.CLASS, statement.lineno, bases=bases)
            yield from _definitions(statement.body, f"{prefix}{statement.name}.", wanted)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield prefix + target.id, Definition(DefinitionKind.VALUE, statement.lineno)
        else:
            for inner in _blocks(statement):
                yield from _definitions(inner, prefix, wanted)


def _function(
    statement: ast.FunctionDef | ast.AsyncFunctionDef, decorators: set[str], prefix: str, wanted: SurveyRequest
) -> Definition:
    kind = DefinitionKind.ASYNC_FUNCTION if isinstance(statement, ast.AsyncFunctionDef) else DefinitionKind.FUNCTION
    if decorators & PROPERTIES:
        kind = DefinitionKind.PROPERTY
    made: dict[str, int] = {}
    if wanted.calls and prefix.removesuffix(".") in wanted.callers:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                for call in _endings(node.func) & wanted.calls:
                    made[call] = min(made.get(call, node.lineno), node.lineno)
    signature = of_arguments(statement.args) if statement.name in wanted.names else None
    return Definition(kind, statement.lineno, signature, calls=made)


def _endings(function: ast.expr) -> set[str]:
    """All dotted endings: `self.accelerator.accumulate`, `accelerator.accumulate` and `accumulate`."""
    endings: set[str] = set()
    ending = ""
    while isinstance(function, ast.Attribute):
        ending = f"{function.attr}.{ending}" if ending else function.attr
        endings.add(ending)
        function = function.value
    if isinstance(function, ast.Name):
        endings.add(f"{function.id}.{ending}" if ending else function.id)
    return endings


def _last_name(expression: ast.expr) -> str:
    """The last part of a dotted name: `functools.cached_property` -> `cached_property`.

    For a call or a subscript it is the name of what is called or subscripted.
    """
    while isinstance(expression, ast.Call | ast.Subscript):
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The bodies of compound statements (if, try, with, loops, match), which may contain definitions."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list):
            yield block
    if isinstance(statement, ast.Try | ast.TryStar):
        yield from (handler.body for handler in statement.handlers)
    if isinstance(statement, ast.Match):
        yield from (case.body for case in statement.cases)


def _imported(body: Iterable[ast.stmt]) -> Iterator[tuple[str, int]]:
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from ((one.asname or one.name.partition(".")[0], statement.lineno) for one in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield from ((one.asname or one.name, statement.lineno) for one in statement.names)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for inner in _blocks(statement):
                yield from _imported(inner)


def _counts(file: str, point: Point) -> bool:
    """Whether the existence of `file` alone matters for `point`."""
    return file in file_names(point.module) or (not point.target and same_name(file, point.module))


def _names(facts: UpstreamFacts, points: tuple[Point, ...]) -> frozenset[str]:
    """Names of the points, of their classes, and of the same members in all base classes."""
    bases: dict[str, set[str]] = {}
    for module in facts.modules.values():
        for name, one in module.definitions.items():
            if one.bases:
                bases.setdefault(name, set()).update(one.bases)
    names: set[str] = set()
    for point in points:
        names |= {point.target, point.owner}
        leaf = point.target.rpartition(".")[2]
        waiting = [point.owner] if point.owner else []
        seen: set[str] = set()
        while waiting:
            owner = waiting.pop()
            if owner not in seen:
                seen.add(owner)
                waiting += sorted(bases.get(owner, ()))
        names |= seen | {f"{owner}.{leaf}" for owner in seen}
    return frozenset(names)
