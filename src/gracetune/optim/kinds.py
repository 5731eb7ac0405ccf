"""The optimizers a config can name: where each comes from, what it takes, and how ours and its words meet."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from gracetune.config.run_config import Optimizer as Asked
from gracetune.config.spelling import misspelt
from gracetune.errors import ConfigError, Problem
from gracetune.optim.automagic import Automagic
from gracetune.optim.lion import Lion

Arguments = dict[str, Any]
_OURS: Final = ("params", "lr", "weight_decay", "betas", "eps")
"""Given by sections of their own, not by `options`."""


@dataclass(frozen=True)
class Kind:
    """One optimizer."""

    load: Callable[[Sequence[Tensor]], type[torch.optim.Optimizer]]
    """Its class; refuses where the package or the device is missing."""
    prepare: Callable[[Arguments, Asked, Sequence[Tensor]], Arguments] = lambda arguments, asked, parameters: arguments
    """Last changes to the constructor's arguments."""
    hidden: tuple[str, ...] = ()
    """Constructor arguments that `options` may not set: something else decides them."""
    no_effect: Mapping[str, str] = field(default_factory=dict)
    """Options that other programs' optimizers of this name take, and why they change nothing here."""


def _of(cls: type[torch.optim.Optimizer]) -> Callable[[Sequence[Tensor]], type[torch.optim.Optimizer]]:
    return lambda parameters: cls


def _from(package: str, module: str, name: str) -> Callable[[Sequence[Tensor]], type[torch.optim.Optimizer]]:
    """A class of an optional package."""

    def load(parameters: Sequence[Tensor]) -> type[torch.optim.Optimizer]:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            expected = f"the package {package}, which is not installed"
            raise ConfigError([Problem("optimizer.name", name, expected, f"pip install {package}")])
        found: type[torch.optim.Optimizer] = getattr(importlib.import_module(module), name)
        return found

    return load


def _eight_bit(parameters: Sequence[Tensor]) -> type[torch.optim.Optimizer]:
    elsewhere = next((parameter.device for parameter in parameters if not parameter.is_cuda), None)
    if elsewhere is not None:
        expected = f"parameters on a CUDA GPU; these are on {elsewhere}"
        raise ConfigError([Problem("optimizer.name", "adamw_8bit", expected, "--set optimizer.name=adamw")])
    return _from("bitsandbytes", "bitsandbytes.optim", "AdamW8bit")(parameters)


def _adamw(arguments: Arguments, asked: Asked, parameters: Sequence[Tensor]) -> Arguments:
    chosen = {"fused", "foreach", "capturable", "differentiable"} & arguments.keys()
    can = all(p.is_cuda or (p.device.type == "cpu" and p.dtype == torch.float32) for p in parameters)
    return arguments if chosen or not can else {**arguments, "fused": True}


def _adafactor(arguments: Arguments, asked: Asked, parameters: Sequence[Tensor]) -> Arguments:
    # Its own defaults (relative_step, scale_parameter) are for training without a learning rate; a config has one.
    arguments = {"relative_step": False, "scale_parameter": False, **arguments}
    if isinstance(arguments.get("eps"), float):
        arguments["eps"] = (arguments["eps"], 1e-3)
    return {**arguments, "lr": None} if arguments["relative_step"] else arguments


_FP32 = "what is trained is held in fp32, where there is nothing to round off"
KINDS: Final[Mapping[str, Kind]] = {
    "adamw": Kind(_of(torch.optim.AdamW), _adamw),
    "adamw_8bit": Kind(_eight_bit),
    "adafactor": Kind(
        _from("transformers", "transformers.optimization", "Adafactor"),
        _adafactor,
        no_effect={"stochastic_accumulation": _FP32, "stochastic_rounding": _FP32},
    ),
    "lion": Kind(_of(Lion), no_effect={"use_triton": "ours is one pass over all tensors already"}),
    "prodigy": Kind(_from("prodigyopt", "prodigyopt", "Prodigy"), hidden=("fsdp_in_use",)),
    "prodigy_plus_schedule_free": Kind(
        _from("prodigy-plus-schedule-free", "prodigyplus.prodigy_plus_schedulefree", "ProdigyPlusScheduleFree"),
        hidden=("fused_back_pass",),
    ),
    "automagic": Kind(_of(Automagic), hidden=("lr_bump", "min_lr", "max_lr")),
}


def constructor_arguments(cls: type[torch.optim.Optimizer]) -> tuple[str, ...]:
    """What its constructor takes by name."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name for p in parameters if p.name != "self" and p.kind not in variadic)


def arguments_of(asked: Asked, cls: type[torch.optim.Optimizer], parameters: Sequence[Tensor]) -> Arguments:
    """The constructor's arguments a config asks for; all it cannot take is refused at once."""
    kind, takes = KINDS[asked.name], constructor_arguments(cls)
    settings = {"weight_decay": asked.weight_decay, "betas": asked.betas, "eps": asked.eps}
    given = {name: value for name, value in settings.items() if value is not None}
    free = [name for name in takes if name not in ("params", "lr", *kind.hidden)]
    problems = [
        Problem(f"optimizer.{name}", str(value), f"nothing: {asked.name} takes {', '.join(free)}", f"remove `{name}`")
        for name, value in given.items()
        if name not in takes
    ]
    options = {}
    for name, value in asked.options.items():
        if name in kind.no_effect and all(parameter.dtype == torch.float32 for parameter in parameters):
            continue
        if name not in free:
            problems.append(_unknown(asked, name, value, kind, free))
        elif name in given:
            problems.append(_twice(name, value, given[name]))
        else:
            options[name] = tuple(value) if isinstance(value, list) else value
    if problems:
        raise ConfigError(problems)
    return kind.prepare({"lr": asked.lr, **given, **options}, asked, parameters)


def _unknown(asked: Asked, name: str, value: Any, kind: Kind, free: Sequence[str]) -> Problem:
    key = f"optimizer.options.{name}"
    if name in kind.hidden and asked.name == "automagic":
        return Problem(key, str(value), f"optimizer.limits.{name}", f"write it in `limits`: {{{name}: {value}}}")
    others = [option for option in free if option not in _OURS]
    expected = f"an option of {asked.name}: {', '.join(others)}"
    return Problem(key, str(value), expected, misspelt(name, others, write="{}"))


def _twice(name: str, value: Any, other: Any) -> Problem:
    found = f"{value}, and {other} in optimizer.{name}"
    return Problem(f"optimizer.options.{name}", found, "one of the two", f"remove `{name}` from `options`")
