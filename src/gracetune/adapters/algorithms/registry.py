"""All adapter algorithms by name: ours, and those of other installed packages.

A distribution brings one by an entry point of the group `gracetune.adapters`: its name is what `adapter.kind` says, its
value a module with `ALGORITHM`, an `Algorithm` of that name. Our own are modules of this folder. The names are known
when gracetune starts; a module of others is imported when its algorithm is asked for, so that a package that cannot be
imported stops nobody who does not use it.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from gracetune.adapters.algorithms.record import Algorithm
from gracetune.errors import ConfigError, Problem

GROUP = "gracetune.adapters"
OURS = ("lora", "dora", "lokr", "loha", "locon", "ia3", "diag_oft", "full_delta")
"""One file of this folder each. A later one may have the tensors of an earlier one and more, as DoRA and LoCon have
LoRA's: what a file holds is looked up from the end."""
FULL_FINETUNE = "full_finetune"
"""The kind that is no adapter: the weights themselves are trained. No algorithm may be called so."""
_POINTS: tuple[EntryPoint, ...] = tuple(entry_points(group=GROUP))
NAMES: tuple[str, ...] = tuple(dict.fromkeys((*OURS, *(point.name for point in _POINTS))))


@cache
def algorithm(name: str) -> Algorithm:
    """The record of a name in `NAMES`. One of another package that cannot be used is a `ConfigError`."""
    if name not in NAMES:
        raise ValueError(f"no adapter algorithm is called {name}: there are {', '.join(NAMES)}")
    points = [point for point in _POINTS if point.name == name]
    if not points:
        found: Algorithm = importlib.import_module(f"gracetune.adapters.algorithms.{name}").ALGORITHM
        return found
    if len(points) > 1 or name in (*OURS, FULL_FINETUNE):
        places = [*(["gracetune itself"] if name in (*OURS, FULL_FINETUNE) else []), *(point.value for point in points)]
        raise _refused(name, f"two algorithms of this name: {', '.join(places)}", "one")
    place = points[0].value
    try:
        module = importlib.import_module(place)
    except Exception as error:  # code of others, run for the first time: whatever it raises is theirs to repair
        raise _refused(name, f"{place} cannot be imported: {type(error).__name__}: {error}", "a module") from error
    record = vars(module).get("ALGORITHM")
    if not isinstance(record, Algorithm):
        raise _refused(name, f"{place} without ALGORITHM", "ALGORITHM, an instance of a subclass of Algorithm")
    if record.name != name:
        raise _refused(name, f"an algorithm called {record.name} in {place}", f"name = {name!r} there")
    return record


@cache
def algorithms() -> tuple[Algorithm, ...]:
    """Every record, in the order of `NAMES`. One that cannot be used is left out, and refused where it is asked for."""
    found = []
    for name in NAMES:
        with suppress(ConfigError):
            found.append(algorithm(name))
    return tuple(found)


def _refused(name: str, found: str, expected: str) -> ConfigError:
    hint = f"repair or `pip uninstall` the package whose entry point in {GROUP} is called {name} (docs/extending.md)"
    return ConfigError([Problem(f"the installed adapter algorithm {name}", found, expected, hint)])
