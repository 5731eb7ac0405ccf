"""The records of all adapter algorithms, by name. `config/registry.py` lists their modules."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

from gracetune.adapters.algorithms.record import Algorithm
from gracetune.config.registry import ALGORITHM_NAMES, ALGORITHMS, checked_record
from gracetune.errors import ConfigError


@cache
def algorithm(name: str) -> Algorithm:
    """The record of this name. Raises `ConfigError` if the record of an installed package cannot be used."""
    if name not in ALGORITHM_NAMES:
        raise ValueError(f"no adapter algorithm is called {name}: there are {', '.join(ALGORITHM_NAMES)}")
    record = checked_record(name)
    if not isinstance(record, Algorithm):
        raise ALGORITHMS.rejected(name, repr(record), "an Algorithm")
    return record


@cache
def algorithms() -> tuple[Algorithm, ...]:
    """Every record, in the order of the names, without those that cannot be used."""
    found = []
    for name in ALGORITHM_NAMES:
        with suppress(ConfigError):
            found.append(algorithm(name))
    return tuple(found)
