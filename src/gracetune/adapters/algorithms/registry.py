"""The records of all adapter algorithms, by name. `config/adapter_kinds.py` lists where each is."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

from gracetune.adapters.algorithms.record import Algorithm
from gracetune.config.adapter_kinds import ALGORITHM_NAMES, ALGORITHMS, checked_record
from gracetune.errors import ConfigError


@cache
def algorithm(name: str) -> Algorithm:
    """One of another package that cannot be used is a `ConfigError`."""
    if name not in ALGORITHM_NAMES:
        raise ValueError(f"no adapter algorithm is called {name}: there are {', '.join(ALGORITHM_NAMES)}")
    record = checked_record(name)
    if not isinstance(record, Algorithm):
        raise ALGORITHMS.rejected(name, repr(record), "an Algorithm")
    return record


def is_loadable(name: str) -> bool:
    """Whether some program loads it from a file. Of an algorithm of another package nothing is known."""
    return name in ALGORITHMS.ours and algorithm(name).loadable


@cache
def algorithms() -> tuple[Algorithm, ...]:
    """Every record, in the order of the names. One that cannot be used is left out."""
    found = []
    for name in ALGORITHM_NAMES:
        with suppress(ConfigError):
            found.append(algorithm(name))
    return tuple(found)
