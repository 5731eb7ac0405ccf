"""Wrap names of upstream: any callable with any arguments, after checking that it exists.

    installer = Installer()
    installer.wrap(Hook("package.module:Class.method", "caches", "why"), around)

`around(original, *arguments, **options)` decides whether and how to call the original. Several hooks may wrap the same
name; the last one is the outermost. `undo` restores everything.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gracetune_simpletuner.errors import HookError, ReadError
from gracetune_simpletuner.points import READS, Hook

Around = Callable[..., Any]
"""Called with the original function, followed by its arguments."""

_TARGET = re.compile(r"(?P<module>[\w.]+):(?P<name>[\w.]+)(?:\[(?P<key>\w+)\])?")


@dataclass(frozen=True)
class Target:
    """The parts of a hook's target."""

    module: str
    owner: tuple[str, ...]
    name: str
    key: str | None

    @classmethod
    def parse(cls, text: str) -> Target:
        match = _TARGET.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is neither module:name nor module:table[key]")
        *owner, name = match["name"].split(".")
        return cls(match["module"], tuple(owner), name, match["key"])


class Installer:
    """Wraps names, and restores them with `undo`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self.installed: list[Hook] = []

    def wrap(self, hook: Hook, around: Around) -> None:
        """Wrap the target now, and import its module if needed. `on_import` hooks wait until upstream imports it."""
        target = Target.parse(hook.target)
        if hook.on_import and target.module not in sys.modules:
            check_modules([hook])
            finder = AfterImport({target.module: lambda module: self.wrap_in(module, hook, around)})
            sys.meta_path.insert(0, finder)
            self._undo.append(lambda: sys.meta_path.remove(finder))
            return
        try:
            module = importlib.import_module(target.module)
        except ModuleNotFoundError as error:
            raise HookError(hook.target, f"no module {error.name}") from error
        self.wrap_in(module, hook, around)

    def wrap_in(self, module: ModuleType, hook: Hook, around: Around) -> None:
        target = Target.parse(hook.target)
        owner: Any = module
        for part in target.owner:
            owner = _static(owner, part)
            if owner is None:
                raise HookError(hook.target, f"no {part} in {target.module}")
        undo = _wrap_entry(owner, target, hook, around) if target.key else _wrap_name(owner, target, hook, around)
        self._undo.append(undo)
        self.installed.append(hook)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
        self.installed.clear()


def _static(owner: Any, name: str) -> Any:
    """The attribute without calling descriptors; inherited ones count."""
    return inspect.getattr_static(owner, name, None)


def _wrap_name(owner: Any, target: Target, hook: Hook, around: Around) -> Callable[[], None]:
    found = _static(owner, target.name)
    plain = found.__func__ if isinstance(found, staticmethod) else found
    if not callable(plain):
        raise HookError(hook.target, "nothing of that name" if found is None else f"a {type(found).__name__}")
    inherited = target.name not in vars(owner)
    wrapped: Any = _wrapper(plain, around)
    setattr(owner, target.name, staticmethod(wrapped) if isinstance(found, staticmethod) else wrapped)

    def undo() -> None:
        if inherited:
            delattr(owner, target.name)
        else:
            setattr(owner, target.name, found)

    return undo


def _wrap_entry(owner: Any, target: Target, hook: Hook, around: Around) -> Callable[[], None]:
    table = _static(owner, target.name)
    found = table.get(target.key) if isinstance(table, dict) else None
    if not callable(found):
        raise HookError(hook.target, f"no entry {target.key!r} in {target.name}")
    table[target.key] = _wrapper(found, around)

    def undo() -> None:
        table[target.key] = found

    return undo


def _wrapper(original: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return around(original, *arguments, **options)

    return wrapped


class AfterImport(importlib.abc.MetaPathFinder):
    """Runs an action right after a module is executed, so that upstream keeps its own import order."""

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._actions = dict(actions)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        action = self._actions.pop(fullname, None)
        if action is None:
            return None
        spec = _find_with_others(self, fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this loader serves this module alone
        return spec


def _find_with_others(
    ours: AfterImport, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        if finder is not ours:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
    return None


def check_modules(hooks: Sequence[Hook]) -> None:
    """Check that every module to wrap has a file. A hook on a module that upstream moved would wait forever."""
    for hook in hooks:
        module = Target.parse(hook.target).module
        top, *rest = module.split(".")
        spec = importlib.util.find_spec(top)  # finding a top-level name imports nothing
        if spec is None or spec.submodule_search_locations is None:
            raise HookError(hook.target, f"no package {top} in this environment")
        places = [f"{folder}/{'/'.join(rest)}" for folder in spec.submodule_search_locations]
        if not any(_is_module(place) for place in places):
            raise HookError(hook.target, f"no module {module}")


def check_reads(what: str, thing: object) -> None:
    """Check that an object of upstream has every attribute that `points.READS` lists.

    Call it when the object is first used. A later AttributeError would surface inside upstream, which catches it.
    """
    missing = [name for name in READS[what] if not _has(thing, name)]
    if missing:
        raise ReadError(what, missing, thing)


def _has(thing: object, name: str) -> bool:
    return name in thing if isinstance(thing, Mapping) else hasattr(thing, name)


def _is_module(place: str) -> bool:
    return Path(f"{place}.py").is_file() or Path(place, "__init__.py").is_file()
