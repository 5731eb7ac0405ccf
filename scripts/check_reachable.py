"""Fail for every public symbol of gracetune that nothing a user can start reaches.

    python scripts/check_reachable.py

A symbol is a function, class, method or constant without a leading underscore. It is reachable if it is used, through
whatever chain, by a command (`gracetune`, a script at the root or in scripts, an overlay), by a name of
`gracetune.gh200` or `gracetune.extension`, or by an extension point: what docs/extending.md names. Tests and benches do
not count: what only a bench uses is no part of a run. (What belongs to `gracetune bench` itself may be reached from
there.)

The check reads the source and imports nothing. It follows annotations to learn whose method a call means; where it
cannot, a method counts as used if its name is (unless the name is one of a standard type, as `write` is of a file).
A symbol that it reports and that is needed nevertheless belongs in scripts/reachable.txt, with the reason.
"""

from __future__ import annotations

import ast
import io
import logging
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = ROOT / "scripts" / "reachable.txt"
STANDARD = (str, bytes, list, dict, set, int, memoryview, io.BufferedReader, io.StringIO, Path, threading.Thread,
            threading.Event, socket.socket, subprocess.Popen, re.Match, logging.Logger, Future)  # fmt: skip
COMMON = {name for kind in STANDARD for name in dir(kind)}
HARMLESS_BASES = {"object", "Protocol", "ABC", "Enum", "IntEnum", "StrEnum", "NamedTuple", "Exception", "BaseModel",
                  "Generic", "ValueError", "RuntimeError", "KeyError", "TypeError", "OSError", "Warning"}  # fmt: skip
ITERABLES = {"list", "set", "frozenset", "Sequence", "Iterable", "Iterator", "Generator", "Collection", "deque",
             "MutableSequence", "Set", "AbstractSet", "AbstractContextManager", "ContextManager"}  # fmt: skip
MAPPINGS = {"dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict", "Counter"}
WRAPPERS = {"Annotated", "Optional", "Final", "ClassVar", "Required", "NotRequired"}
Function = ast.FunctionDef | ast.AsyncFunctionDef

Type: TypeAlias = frozenset[tuple[Any, ...]]
"""What an expression may be: ("is", class), ("class", class), ("calls", function), ("module", name), ("items", type),
("map", type of keys, of values), ("fixed", types of a tuple), ("returns", type), ("outside",). Empty: unknown."""
UNKNOWN: Type = frozenset()
OUTSIDE: Type = frozenset([("outside",)])


@dataclass
class Symbol:
    name: str
    """With its module, as `gracetune.data.text_format.counted`."""
    module: str
    node: ast.stmt
    owner: str | None = None
    """The class of a method."""

    @property
    def is_public(self) -> bool:
        return not any(part.startswith("_") for part in self.name.split("."))


@dataclass
class Module:
    name: str
    tree: ast.Module
    imported: dict[str, str] = field(default_factory=dict)
    """Local name -> what it stands for."""

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            self.imported |= _imported(node)


@dataclass
class Package:
    """Every definition below a folder, and what names and expressions mean."""

    modules: dict[str, Module]
    symbols: dict[str, Symbol] = field(default_factory=dict)
    attributes: dict[tuple[str, str], Type] = field(default_factory=dict)
    returning: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for module in self.modules.values():
            for node in _flat(module.tree.body):
                for name in _defined(node):
                    symbol = Symbol(f"{module.name}.{name}", module.name, node)
                    self.symbols.setdefault(symbol.name, symbol)
                owner = f"{module.name}.{node.name}" if isinstance(node, ast.ClassDef) else ""
                if isinstance(node, ast.ClassDef) and self.symbols[owner].node is node:
                    for inner in node.body:
                        if isinstance(inner, Function):
                            symbol = Symbol(f"{owner}.{inner.name}", module.name, inner, owner)
                            self.symbols.setdefault(symbol.name, symbol)

    def resolve(self, module: str, name: str, seen: tuple[str, ...] = ()) -> str | None:
        """The symbol or module of ours that a name means there; None for one of elsewhere."""
        own = f"{module}.{name}"
        if own in self.symbols or own in self.modules:
            return own
        target = self.modules[module].imported.get(name) if module in self.modules else None
        return None if target is None or own in seen else self.qualified(target, (*seen, own))

    def qualified(self, target: str, seen: tuple[str, ...] = ()) -> str | None:
        if target in self.symbols or target in self.modules:
            return target
        above, _, last = target.rpartition(".")
        return self.resolve(above, last, seen) if above in self.modules else None

    @cached_property
    def classes(self) -> dict[str, Symbol]:
        return {name: one for name, one in self.symbols.items() if isinstance(one.node, ast.ClassDef)}

    def bases(self, name: str) -> tuple[list[str], bool]:
        """Those of ours, and whether there is one of elsewhere whose methods call ours."""
        symbol, ours, outside = self.classes[name], [], False
        assert isinstance(symbol.node, ast.ClassDef)
        for base in symbol.node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            found = self.resolve(symbol.module, plain.id) if isinstance(plain, ast.Name) else None
            if found in self.classes:
                ours.append(found)
            else:
                outside |= ast.unparse(plain).rpartition(".")[2] not in HARMLESS_BASES
        return ours, outside

    @cached_property
    def lines(self) -> dict[str, tuple[str, ...]]:
        """Each class with all above it, itself first."""

        def line(name: str) -> tuple[str, ...]:
            return tuple(dict.fromkeys((name, *(above for base in self.bases(name)[0] for above in line(base)))))

        return {name: line(name) for name in self.classes}

    @cached_property
    def calls_back(self) -> set[str]:
        """Classes with a base of elsewhere, which may call any of their methods."""
        return {name for name, line in self.lines.items() if any(self.bases(one)[1] for one in line)}

    def members(self, name: str) -> set[str]:
        return {member for one in self.lines[name] for member in _members(self.classes[one].node)}

    @cached_property
    def relatives(self) -> dict[str, set[str]]:
        """Classes through which a class's methods may be called: those above and below it, protocols it satisfies."""
        protocols = {name: self.members(name) for name, one in self.classes.items()
                     if any("Protocol" in ast.unparse(base) for base in one.node.bases)}  # type: ignore[attr-defined] # fmt: skip
        members = {name: self.members(name) | self._assigned(name) for name in self.classes}
        above = {name: {*line, *(protocol for protocol, names in protocols.items() if names and names <= members[name])}
                 for name, line in self.lines.items()}  # fmt: skip
        for name, found in list(above.items()):
            found |= {one for protocol in found & protocols.keys() for one in self.lines[protocol]}
            for higher in self.lines[name]:
                above[higher] = above[higher] | found
        return above

    def _assigned(self, name: str) -> set[str]:
        return {target.attr for one in self.lines[name] for node in ast.walk(self.classes[one].node)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                for target in [node] if isinstance(node.value, ast.Name) and node.value.id == "self"}  # fmt: skip

    # -- types ---------------------------------------------------------------------------------------------------------

    def annotated(self, node: ast.expr | None, module: str, owner: str | None = None, deep: int = 0) -> Type:
        if node is None or deep > 12:
            return UNKNOWN

        def read(inner: ast.expr) -> Type:
            return self.annotated(inner, module, owner, deep + 1)

        if isinstance(node, ast.Constant):
            text = node.value
            return read(ast.parse(text, mode="eval").body) if isinstance(text, str) else OUTSIDE
        if isinstance(node, ast.BinOp):
            return read(node.left) | read(node.right)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._named(node, module, owner, deep)
        if isinstance(node, ast.Subscript):
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            base = ast.unparse(node.value).rpartition(".")[2]
            if base in WRAPPERS:
                return read(inner[0])
            if base == "tuple":
                several = len(inner) == 2 and isinstance(inner[1], ast.Constant)
                return frozenset([("items", read(inner[0]))] if several else [("fixed", tuple(map(read, inner)))])
            if base in ITERABLES:
                return frozenset([("items", read(inner[0]))])
            if base in MAPPINGS:
                return frozenset([("map", read(inner[0]), read(inner[-1]))])
            if base == "Callable":
                return frozenset([("returns", read(inner[-1]))])
            if base == "type":
                return frozenset(("class", one[1]) for one in read(inner[0]) if one[0] == "is")
            return read(node.value)
        return UNKNOWN

    def _named(self, node: ast.Name | ast.Attribute, module: str, owner: str | None, deep: int) -> Type:
        name = ast.unparse(node)
        if name == "Self" and owner:
            return frozenset([("is", owner)])
        head, _, rest = name.partition(".")
        found = self.resolve(module, head)
        if found is not None and rest:
            found = self.qualified(f"{found}.{rest}")
        if found in self.classes:
            return frozenset([("is", found)])
        if found in self.symbols:  # an alias
            alias = self.symbols[found].node
            value = alias.value if isinstance(alias, ast.Assign | ast.AnnAssign) else None
            return self.annotated(value, self.symbols[found].module, owner, deep + 1)
        return UNKNOWN if head in ("Any", "object", "ModuleType") or len(name) == 1 else OUTSIDE

    def returned(self, name: str) -> Type:
        """What a call of a function gives."""
        symbol = self.symbols[name]
        assert isinstance(symbol.node, Function)
        stated = self.annotated(symbol.node.returns, symbol.module, symbol.owner)
        if stated or name in self.returning:
            return stated
        self.returning.append(name)
        reader = Reader(self, symbol.module, symbol.owner)
        reader.learn(symbol.node)
        values = [node.value for node in ast.walk(symbol.node) if isinstance(node, ast.Return) and node.value]
        found = UNKNOWN.union(*map(reader.type_of, values))
        self.returning.pop()
        return found

    def attribute(self, owner: str, name: str) -> Type:
        """Of an object of a class: a method, what a property gives, what a field holds."""
        if (owner, name) not in self.attributes:
            self.attributes[owner, name] = UNKNOWN  # while we look: it may depend on itself
            self.attributes[owner, name] = self._attribute(owner, name)
        return self.attributes[owner, name]

    def _attribute(self, owner: str, name: str) -> Type:
        for one in self.lines[owner]:
            symbol = self.classes[one]
            assert isinstance(symbol.node, ast.ClassDef)
            method = self.symbols.get(f"{one}.{name}")
            if method is not None:
                given = {ast.unparse(decorator).rpartition(".")[2] for decorator in method.node.decorator_list}  # type: ignore[attr-defined]
                if given & {"property", "cached_property", "setter"}:
                    return self.returned(method.name)
                return frozenset([("calls", method.name)])
            for node in symbol.node.body:
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
                    return self.annotated(node.annotation, symbol.module, one)
                if isinstance(node, ast.Assign) and name in _defined(node):
                    return frozenset([("is", one)])  # a member of an enumeration
            found = UNKNOWN
            for node in symbol.node.body:
                if isinstance(node, Function):
                    found |= Reader(self, symbol.module, one).kept(node, name)
            if found:
                return found
        return UNKNOWN


class Reader:
    """Goes through the code of one symbol and finds what it uses."""

    def __init__(self, package: Package, module: str, owner: str | None) -> None:
        self.package, self.module, self.owner = package, module, owner
        self.local: dict[str, Type] = {}
        self.imported: dict[str, str] = {}

    def resolve(self, name: str) -> str | None:
        """As the package does, with what a function imports for itself."""
        own = self.package.qualified(self.imported[name]) if name in self.imported else None
        return own or self.package.resolve(self.module, name)

    def kept(self, function: Function, name: str) -> Type:
        """What a method puts into `self.name`."""
        stored = [node for node in ast.walk(function) if isinstance(node, ast.Attribute) and node.attr == name
                  and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"]  # fmt: skip
        if not stored:
            return UNKNOWN
        self.learn(function)
        found = UNKNOWN
        for node in ast.walk(function):
            if isinstance(node, ast.AnnAssign) and node.target in stored:
                found |= self.package.annotated(node.annotation, self.module, self.owner)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    for part, kind in self.parts(target, self.type_of(node.value), node.value):
                        found |= kind if part in stored else UNKNOWN
        return found

    def learn(self, node: ast.AST) -> None:
        """The types of local names; twice, since loops use what is assigned below."""
        for _ in range(2):
            for inner in ast.walk(node):
                self._learn(inner)

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self.imported |= _imported(node)
        elif isinstance(node, ast.Lambda):
            for argument, value in zip(node.args.args[::-1], node.args.defaults[::-1], strict=False):
                self.know(argument.arg, self.type_of(value))
        elif isinstance(node, Function):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for argument in every:
                if argument.annotation is not None:
                    self.know(argument.arg, self.package.annotated(argument.annotation, self.module, self.owner))
            methods = self.owner and self.package.symbols.get(f"{self.owner}.{node.name}")
            if methods and methods.node is node and every:
                is_class = any("classmethod" in ast.unparse(one) for one in node.decorator_list)
                self.know(every[0].arg, frozenset([("class" if is_class else "is", self.owner)]))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self.bind(target, self.type_of(node.value), node.value)
        elif isinstance(node, ast.AnnAssign):
            kind = self.package.annotated(node.annotation, self.module, self.owner)
            self.bind(node.target, kind or (self.type_of(node.value) if node.value else UNKNOWN))
        elif isinstance(node, ast.NamedExpr):
            self.bind(node.target, self.type_of(node.value))
        elif isinstance(node, ast.For | ast.comprehension):
            self.bind(node.target, self.item_of(self.type_of(node.iter)))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self.bind(node.optional_vars, self.entered(self.type_of(node.context_expr)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" and len(node.args) == 2:
            if isinstance(node.args[0], ast.Name):
                for part in ast.walk(node.args[1]):
                    if isinstance(part, ast.Name):
                        self.know(node.args[0].id, self.package.annotated(part, self.module))
        elif isinstance(node, ast.MatchAs) and node.name and isinstance(node.pattern, ast.MatchClass):
            self.know(node.name, self.package.annotated(node.pattern.cls, self.module))

    def know(self, name: str, kind: Type) -> None:
        self.local[name] = self.local.get(name, UNKNOWN) | kind

    def bind(self, target: ast.expr, kind: Type, value: ast.expr | None = None) -> None:
        for part, its in self.parts(target, kind, value):
            if isinstance(part, ast.Name):
                self.know(part.id, its)

    def parts(self, target: ast.expr, kind: Type, value: ast.expr | None = None) -> Iterator[tuple[ast.expr, Type]]:
        if not isinstance(target, ast.Tuple | ast.List):
            yield target, kind
            return
        for position, part in enumerate(target.elts):
            if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                yield from self.parts(part, self.type_of(value.elts[position]))
                continue
            its = UNKNOWN
            for one in kind:
                if one[0] == "fixed" and position < len(one[1]):
                    its |= one[1][position]
                else:
                    its |= self.item_of(frozenset([one]))
            yield from self.parts(part, its)

    def item_of(self, kind: Type) -> Type:
        found = UNKNOWN
        for one in kind:
            if one[0] in ("items", "map"):
                found |= one[1]
            elif one[0] == "fixed":
                found |= UNKNOWN.union(*one[1])
            elif one[0] == "is" and (method := self.package.attribute(one[1], "__iter__")):
                found |= self.item_of(self.called(method))
            elif one[0] == "outside":
                found |= OUTSIDE
        return found

    def entered(self, kind: Type) -> Type:
        found = UNKNOWN
        for one in kind:
            if one[0] == "items":  # a generator with @contextmanager
                found |= one[1]
            elif one[0] == "is":
                method = self.package.attribute(one[1], "__enter__")
                found |= (self.called(method) if method else UNKNOWN) | frozenset([one])
            else:
                found |= frozenset([one])
        return found

    def called(self, kind: Type) -> Type:
        found = UNKNOWN
        for one in kind:
            if one[0] == "class":
                found |= frozenset([("is", one[1])])
            elif one[0] == "calls":
                found |= self.package.returned(one[1])
            elif one[0] == "returns":
                found |= one[1]
            elif one[0] == "outside":
                found |= OUTSIDE
        return found

    def type_of(self, node: ast.expr) -> Type:
        if isinstance(node, ast.Name):
            if node.id in self.local:
                return self.local[node.id]
            return self.symbol(self.resolve(node.id), node.id)
        if isinstance(node, ast.Attribute):
            return self.attribute(self.type_of(node.value), node.attr)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            found = UNKNOWN
            for one in self.type_of(node.value):
                if one[0] == "fixed" and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
                    found |= one[1][node.slice.value] if -len(one[1]) <= node.slice.value < len(one[1]) else UNKNOWN
                elif one[0] == "map":
                    found |= one[2]
                elif one[0] in ("items", "fixed"):
                    found |= frozenset([one]) if isinstance(node.slice, ast.Slice) else self.item_of(frozenset([one]))
                else:
                    found |= frozenset([one]) if one[0] == "outside" else UNKNOWN
            return found
        if isinstance(node, ast.IfExp):
            return self.type_of(node.body) | self.type_of(node.orelse)
        if isinstance(node, ast.BoolOp):
            return UNKNOWN.union(*map(self.type_of, node.values))
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            return frozenset([("items", self.type_of(node.elt))])
        if isinstance(node, ast.DictComp):
            return frozenset([("map", self.type_of(node.key), self.type_of(node.value))])
        if isinstance(node, ast.List | ast.Set):
            inner = [self.item_of(self.type_of(one.value)) if isinstance(one, ast.Starred) else self.type_of(one)
                     for one in node.elts]  # fmt: skip
            return frozenset([("items", UNKNOWN.union(*inner))])
        if isinstance(node, ast.Tuple):
            return frozenset([("fixed", tuple(map(self.type_of, node.elts)))])
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Starred):
            return self.type_of(node.value)
        return OUTSIDE if isinstance(node, ast.Constant | ast.JoinedStr | ast.Compare | ast.Dict) else UNKNOWN

    def symbol(self, found: str | None, name: str) -> Type:
        package = self.package
        if found is None:
            return (
                OUTSIDE if name in self.package.modules[self.module].imported or name in dir(__builtins__) else UNKNOWN
            )
        if found in package.modules:
            return frozenset([("module", found)])
        if found in package.classes:
            return frozenset([("class", found)])
        symbol = package.symbols[found]
        if isinstance(symbol.node, Function):
            return frozenset([("calls", found)])
        if isinstance(symbol.node, ast.AnnAssign):
            return package.annotated(symbol.node.annotation, symbol.module)
        value = symbol.node.value if isinstance(symbol.node, ast.Assign) else None
        return Reader(package, symbol.module, None).type_of(value) if value is not None else UNKNOWN

    def attribute(self, kind: Type, name: str) -> Type:
        found = UNKNOWN
        for one in kind:
            if one[0] in ("is", "class"):
                found |= self.package.attribute(one[1], name)
            elif one[0] == "module":
                found |= self.symbol(self.package.qualified(f"{one[1]}.{name}"), name)
            elif one[0] == "map" and name in ("values", "items", "get", "pop", "setdefault"):
                every = {"values": ("items", one[2]), "items": ("items", frozenset([("fixed", (one[1], one[2]))]))}
                found |= frozenset([("returns", frozenset([every[name]]) if name in every else one[2])])
            elif one[0] == "items" and name in ("pop", "popleft", "copy"):
                found |= frozenset([("returns", one[1] if name != "copy" else frozenset([one]))])
            elif one[0] in ("outside", "items", "map", "fixed"):
                found |= OUTSIDE
        return found

    def _call(self, node: ast.Call) -> Type:
        name = (
            node.func.id
            if isinstance(node.func, ast.Name)
            else node.func.attr
            if isinstance(node.func, ast.Attribute)
            else ""
        )
        arguments = [self.type_of(one) for one in node.args]
        if name in ("list", "tuple", "sorted", "set", "reversed", "iter") and arguments:
            return frozenset([("items", self.item_of(arguments[0]))])
        if name in ("next", "min", "max") and arguments:
            return self.item_of(arguments[0]) | UNKNOWN.union(*arguments[1:])
        if name == "enumerate" and arguments:
            return frozenset([("items", frozenset([("fixed", (OUTSIDE, self.item_of(arguments[0])))]))])
        if name == "zip":
            return frozenset([("items", frozenset([("fixed", tuple(map(self.item_of, arguments)))]))])
        if name == "enter_context" and arguments:
            return self.entered(arguments[0])
        if name in ("replace", "copy", "deepcopy") and arguments and isinstance(node.func, ast.Name):
            return arguments[0]
        if name in ("model_copy", "model_validate") and isinstance(node.func, ast.Attribute):
            return frozenset(("is", one[1]) for one in self.type_of(node.func.value) if one[0] in ("is", "class"))
        if name == "cast" and len(node.args) == 2:
            return self.package.annotated(node.args[0], self.module, self.owner)
        if name == "map" and len(arguments) > 1:
            return frozenset([("items", self.called(arguments[0]))])
        if name == "super" and self.owner:
            return frozenset(("is", one) for one in self.package.bases(self.owner)[0]) or OUTSIDE
        return self.called(self.type_of(node.func))


def _imported(node: ast.AST) -> dict[str, str]:
    if isinstance(node, ast.Import):
        plain = {one.name.split(".")[0]: one.name.split(".")[0] for one in node.names if not one.asname}
        return plain | {one.asname: one.name for one in node.names if one.asname}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return {}


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """With what stands in `if` and `try`."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody", "handlers"):
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                yield from _flat(getattr(node, inner, []))


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


def _members(node: ast.stmt) -> set[str]:
    body = node.body if isinstance(node, ast.ClassDef) else []
    return {name for inner in body for name in _defined(inner) if not name.startswith("__")}


class Reach:
    """What the roots use, and what that uses."""

    def __init__(self, package: Package, *, skipped: tuple[str, ...] = ()) -> None:
        self.package, self.skipped = package, skipped
        self.reached: set[str] = set()
        self.names: set[str] = set()
        """Attributes of objects whose class is unknown."""
        self.used: set[tuple[str, str]] = set()
        self._waiting: list[str] = []

    def add(self, name: str) -> None:
        if name not in self.reached:
            self.reached.add(name)
            self._waiting.append(name)

    def run(self) -> set[str]:
        while self._waiting or self._methods():
            while self._waiting:
                self._visit(self._waiting.pop())
        return self.reached

    def _methods(self) -> bool:
        """Methods of reached classes that are called."""
        before = len(self.reached)
        for name, symbol in self.package.symbols.items():
            if symbol.owner is None or symbol.owner not in self.reached or name in self.reached:
                continue
            last = name.rpartition(".")[2]
            called = any((one, last) in self.used for one in self.package.relatives[symbol.owner])
            unknown = last in self.names and last not in COMMON
            if called or unknown or last.startswith("__") or symbol.owner in self.package.calls_back:
                self.add(name)
        return len(self.reached) > before

    def _visit(self, name: str) -> None:
        if name in self.package.modules:
            module = self.package.modules[name]
            self.read(module.name, [node for node in _flat(module.tree.body) if not _defined(node)])
            for node in module.tree.body:
                if isinstance(node, Function) and any(self._registers(name, one) for one in node.decorator_list):
                    self.reached.add(f"{name}.{node.name}")
                    self.read(name, [node])  # not by its name: several may be called `_`
            return
        symbol = self.package.symbols[name]
        self.add(symbol.module)
        if isinstance(symbol.node, ast.ClassDef):
            body = [node for node in symbol.node.body if not isinstance(node, Function)]
            self.read(symbol.module, [*body, *symbol.node.bases, *symbol.node.decorator_list], symbol.name)
            for above in self.package.lines[name][1:]:
                self.add(above)
        else:
            self.read(symbol.module, [symbol.node], symbol.owner)

    def _registers(self, module: str, decorator: ast.expr) -> bool:
        """Whether a decorator hands the function to a caller, as `@app.command()` does."""
        head = ast.unparse(decorator).split("(")[0].split(".")
        found = self.package.resolve(module, head[0])
        if found is None:
            return isinstance(decorator, ast.Call) and head[-1] not in ("lru_cache", "cache", "wraps")
        return len(head) > 1 and found in self.package.symbols and found not in self.package.classes

    def read(self, module: str, nodes: list[Any], owner: str | None = None) -> None:
        if module.startswith(self.skipped) if self.skipped else False:
            return
        reader = Reader(self.package, module, owner)
        for node in nodes:
            reader.learn(node)
        for node in nodes:
            for inner in ast.walk(node):
                self._use(reader, module, inner)

    def add_constants(self, module: str) -> None:
        for name, symbol in self.package.symbols.items():
            if symbol.module == module and symbol.is_public and isinstance(symbol.node, ast.Assign | ast.AnnAssign):
                self.add(name)

    def _use(self, reader: Reader, module: str, node: ast.AST) -> None:
        if isinstance(node, ast.Name):
            found = reader.resolve(node.id)
            if found is not None:
                self.add(found)
        elif isinstance(node, ast.JoinedStr):  # importlib.import_module(f"gracetune.adapters.algorithms.{name}")
            pattern = "".join(
                re.escape(str(one.value)) if isinstance(one, ast.Constant) else r"\w+" for one in node.values
            )
            for name in self.package.modules if pattern.startswith("gracetune") else ():
                if re.fullmatch(pattern, name):
                    self.add_constants(name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # "gracetune.optim.lion:Lion", by name
            if re.fullmatch(r"gracetune(\.\w+)+:\w+", node.value) and (
                found := self.package.qualified(node.value.replace(":", "."))
            ):
                self.add(found)
        elif isinstance(node, ast.Call):
            for name in _parts_of_families(node, self.package.symbols):
                self.add(name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for name in [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]:
                if name in self.package.modules:
                    self.add(name)
        elif isinstance(node, ast.Attribute):
            kind = reader.type_of(node.value)
            for one in kind:
                if one[0] in ("is", "class"):
                    self.used.add((one[1], node.attr))
                elif one[0] == "module" and (found := self.package.qualified(f"{one[1]}.{node.attr}")):
                    self.add(found)
            if not kind:
                self.names.add(node.attr)


def _parts_of_families(call: ast.Call, symbols: Iterable[str]) -> list[str]:
    """What `FamilyParts("keys", "KEYS")` and `PACKAGES.part(family, "keys", "KEYS")` find in our families' folders."""
    if ast.unparse(call.func) not in ("FamilyParts", "PACKAGES.part"):
        return []
    *_, module, name = (*("", ""), *(str(one.value) for one in call.args if isinstance(one, ast.Constant)))
    return [symbol for symbol in symbols if re.fullmatch(rf"gracetune\.models\.\w+\.{module}\.{name}", symbol)]


def read_package(folder: Path, name: str) -> dict[str, Module]:
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [name, *path.relative_to(folder).with_suffix("").parts]
        dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[dotted] = Module(dotted, ast.parse(path.read_text(encoding="utf-8")))
    return found


def is_bench(module: str) -> bool:
    return any(part == "bench" or part.endswith("_bench") or part.startswith("bench_") for part in module.split("."))


def unreachable(root: Path) -> list[str]:
    modules = read_package(root / "src" / "gracetune", "gracetune")
    outside: dict[str, Module] = {}
    for place in ("overlays/simpletuner/src", "overlays/ai_toolkit", "examples/extending/gracetune_auraflow"):
        outside |= read_package(root / place, place.replace("/", "_"))
    for script in (*root.glob("*.py"), *(root / "scripts").glob("*.py")):
        outside[script.name] = Module(script.name, ast.parse(script.read_text(encoding="utf-8")))
    package = Package(modules | outside)
    extending = (root / "docs" / "extending.md").read_text(encoding="utf-8")
    named = set(re.findall(r"gracetune(?:\.\w+)+", extending))

    def reach(skipped: tuple[str, ...]) -> set[str]:
        found = Reach(package, skipped=skipped)
        for name in (*outside, "gracetune.__main__", "gracetune.cli.main.main", *named):
            if name in package.modules or name in package.symbols:
                found.add(name)
            if name in package.symbols and (owner := package.symbols[name].owner):
                found.add(owner)
                found.used.add((owner, name.rpartition(".")[2]))
        for name, symbol in package.symbols.items():
            if symbol.module in outside or (symbol.module in named and symbol.is_public):
                found.add(name)
        for name in _exported(modules["gracetune.gh200"]):
            found.add(package.resolve("gracetune.gh200", name) or "gracetune.gh200")
        if "gracetune.extension._HOMES" in package.symbols:
            found.add("gracetune.extension._HOMES")  # names every home as "module:Name"
        return found.run()

    benches = tuple(name for name in modules if is_bench(name))
    runs, all_commands = reach(benches), reach(())
    return [
        name
        for name, symbol in package.symbols.items()
        if symbol.module in modules and symbol.is_public
        and name not in (all_commands if is_bench(symbol.module) else runs)
    ]  # fmt: skip


def _exported(module: Module) -> list[str]:
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and "__all__" in _defined(node):
            return [str(one) for one in ast.literal_eval(node.value)]
    return []


def main() -> int:
    allowed = {line.split()[0] for line in ALLOWED.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"}
    found = unreachable(ROOT)
    for name in found:
        if name not in allowed:
            print(f"{name}: nothing a user can start reaches it")
    for name in sorted(allowed - set(found)):
        print(f"{name}: listed in {ALLOWED.relative_to(ROOT)}, but reachable or gone: remove the line")
    return int(set(found) != allowed)


if __name__ == "__main__":
    sys.exit(main())
