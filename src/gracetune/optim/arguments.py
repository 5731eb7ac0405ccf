"""Constructor arguments for the configured optimizer, checked against the constructor's signature."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from gracetune.config.run_config import Optimizer as OptimizerConfig
from gracetune.config.spelling import misspelt
from gracetune.errors import ConfigError, Problem
from gracetune.optim.record import Arguments, OptimizerRecord, optimizer_record

_OURS: Final = ("params", "lr", "weight_decay", "betas", "eps")
"""Arguments with config keys of their own; `options` does not list them."""


def constructor_arguments(cls: type[torch.optim.Optimizer]) -> tuple[str, ...]:
    """Names of the arguments that the constructor of `cls` declares."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name for p in parameters if p.name != "self" and p.kind not in variadic)


def arguments_of(config: OptimizerConfig, cls: type[torch.optim.Optimizer], parameters: Sequence[Tensor]) -> Arguments:
    """Constructor arguments from the config. Raises one ConfigError that lists every argument `cls` does not take."""
    record, takes = optimizer_record(config.name), constructor_arguments(cls)
    settings = {"weight_decay": config.weight_decay, "betas": config.betas, "eps": config.eps}
    given = {name: value for name, value in settings.items() if value is not None}
    free = [name for name in takes if name not in ("params", "lr", *record.hidden, *record.in_section)]
    # `free` holds what `options` may set: neither hidden arguments nor those with config keys of their own.
    problems = [
        Problem(f"optimizer.{name}", str(value), f"nothing: {config.name} takes {', '.join(free)}", f"remove `{name}`")
        for name, value in given.items()
        if name not in takes
    ]
    options = {}
    for name, value in config.options.items():
        if name in record.no_effect and all(parameter.dtype == torch.float32 for parameter in parameters):
            continue
        if name not in free:
            problems.append(_unknown(config, name, value, record, free))
        elif name in given:
            problems.append(_twice(name, value, given[name]))
        else:
            options[name] = tuple(value) if isinstance(value, list) else value
    if problems:
        raise ConfigError(problems)
    return record.prepare({"lr": config.lr, **given, **options}, parameters)


def _unknown(config: OptimizerConfig, name: str, value: Any, record: OptimizerRecord, free: Sequence[str]) -> Problem:
    key = f"optimizer.options.{name}"
    section = record.in_section.get(name)
    if section is not None:
        return Problem(key, str(value), f"optimizer.{section}.{name}", f"write it in `{section}`: {{{name}: {value}}}")
    others = [option for option in free if option not in _OURS]
    expected = f"an option of {config.name}: {', '.join(others)}"
    return Problem(key, str(value), expected, misspelt(name, others, write="{}"))


def _twice(name: str, value: Any, other: Any) -> Problem:
    found = f"{value}, and {other} in optimizer.{name}"
    return Problem(f"optimizer.options.{name}", found, "one of the two", f"remove `{name}` from `options`")
