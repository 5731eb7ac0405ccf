"""Find a point in the running ai-toolkit, wrap it, and remove the wrapper again."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, TracebackType
from typing import Any

from gracetune.extension import ConfigError, Problem

from .points import Point

Function = Callable[..., Any]
Around = Callable[..., Any]
"""Called as `around(original, *args, **kwargs)`; its result is returned to the caller of the method."""

_MARK = "__gracetune_point__"


class UpstreamChangedError(ConfigError):
    """This ai-toolkit lacks something that the overlay needs; lists everything that is missing."""


@dataclass(frozen=True, eq=False)
class Found:
    point: Point
    owner: Any
    """The class or module that has the name."""
    function: Function


def find_all(points: Iterable[Point]) -> list[Found]:
    """Find all points, or raise one error that lists every missing or changed one."""
    looked = [_find(point) for point in points]
    problems = [found for found in looked if isinstance(found, Problem)]
    if problems:
        raise UpstreamChangedError(problems)
    return [found for found in looked if isinstance(found, Found)]


def _find(point: Point) -> Found | Problem:
    try:
        owner: Any = importlib.import_module(point.module)
    except ImportError as error:
        return _problem(point, f"no module {point.module} ({error})")
    *classes, name = point.path
    for depth, step in enumerate(classes):
        owner = inspect.getattr_static(owner, step, None)
        if not inspect.isclass(owner):
            return _problem(point, f"no class {'.'.join(classes[: depth + 1])} in {point.module}")
    function = inspect.getattr_static(owner, name, None)
    if not isinstance(function, FunctionType):
        existing = "nothing" if function is None else f"a {type(function).__name__}"
        return _problem(point, f"{existing} called {'.'.join(point.path)} in {point.module}")
    taken = inspect.signature(function).parameters
    gone = [parameter for parameter in point.parameters if parameter not in taken]
    if gone:
        return _problem(point, f"{point.target}({', '.join(taken)}), which takes no {' and no '.join(gone)}")
    return Found(point, owner, function)


def _problem(point: Point, found: str) -> Problem:
    takes = f" with {', '.join(point.parameters)}" if point.parameters else ""
    hint = "run `gracetune overlay check ai-toolkit --source .` here; without this feature in `gracetune:` the job runs"
    return Problem(f"ai-toolkit for the overlay's {point.feature}", found, f"{point.target}{takes}", hint)


def argument(function: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value of a parameter in a call, given by position, by name or by default."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments[name]


def wrapped_by(found: Found) -> Point | None:
    point = vars(found.function).get(_MARK)
    return point if isinstance(point, Point) else None


def wrap(found: Found, around: Around) -> Callable[[], None]:
    """Install `around`; returns a function that removes it."""
    original, name = found.function, found.point.path[-1]

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, _MARK, found.point)
    own = name in vars(found.owner)
    setattr(found.owner, name, wrapper)

    def undo() -> None:
        if own:
            setattr(found.owner, name, original)
        else:  # inherited
            delattr(found.owner, name)

    return undo


class Hooks:
    """A context manager that installs wrappers and removes them at the end."""

    def __init__(self, wanted: Iterable[tuple[Point, Around]]) -> None:
        self._wanted = list(wanted)
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Hooks:
        founds = find_all(point for point, _ in self._wanted)
        for found, (_, around) in zip(founds, self._wanted, strict=True):
            self._undo.append(wrap(found, around))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()
