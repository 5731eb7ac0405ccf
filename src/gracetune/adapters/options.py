"""The adapter options of one layer: those of the config, overridden by `adapter.by_module` for the layer's class.

Pure functions on plain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gracetune.adapters.targets import Modules, class_names, options_for
from gracetune.config.registry import kind_of_algo, lycoris_names
from gracetune.config.run_config import Adapter
from gracetune.config.spelling import misspelt
from gracetune.errors import ConfigError, Problem

FIELDS: Mapping[str, str] = {
    "dim": "rank",
    "linear_dim": "rank",
    "alpha": "alpha",
    "linear_alpha": "alpha",
    "factor": "factor",
    "full_matrix": "full_rank",
    "decompose_both": "decompose_both",
    "dropout": "dropout",
}
"""LyCORIS' names of a layer's options, and the keys of `adapter` they set."""
OPTIONS = ("algo", *FIELDS)
"""The keys allowed in an entry of `adapter.by_module`."""


@dataclass(frozen=True)
class LayerOptions:
    algorithm: str
    rank: int
    alpha: float
    dropout: float = 0.0
    factor: int = -1
    full_rank: bool = False
    decompose_both: bool = False


@dataclass(frozen=True)
class Resolver:
    """Gives the options of every layer of one model. `resolver` creates it after it has checked `adapter.by_module`."""

    adapter: Adapter
    by_class: Mapping[str, Adapter]
    """Module class -> `adapter` with the overrides of its entry in `adapter.by_module`."""
    modules: Modules
    present: frozenset[str]
    """Every class the model has."""

    def options(self, path: str, *, spatial: bool) -> LayerOptions:
        """The options of the layer at `path`. `spatial` means a convolution whose kernel has more than one pixel:
        `conv_rank` and `conv_alpha` apply to these."""
        entry = options_for(self.modules[path], self.by_class, self.present)
        adapter = self.adapter if entry is None else self.by_class[entry]
        own = () if entry is None else tuple(FIELDS.get(name, name) for name in self.adapter.by_module[entry])
        rank, alpha = adapter.rank, adapter.alpha
        if spatial and "rank" not in own:
            rank = adapter.conv_rank or rank
        if spatial and "alpha" not in own:
            alpha = adapter.conv_alpha or alpha
        if adapter.is_full_finetune:
            raise ValueError("a full fine-tune has no options by layer")
        return LayerOptions(
            algorithm=adapter.kind,
            rank=rank,
            alpha=float(rank if alpha is None else alpha),
            dropout=adapter.dropout,
            factor=adapter.factor if adapter.factor else -1,
            full_rank=adapter.full_rank,
            decompose_both=adapter.decompose_both,
        )


def resolver(adapter: Adapter, selected: Modules, modules: Modules) -> Resolver:
    """Check the names and values of every entry of `adapter.by_module`, and that each entry applies to a selected
    layer."""
    problems: list[Problem] = []
    by_class: dict[str, Adapter] = {}
    for name, options in adapter.by_module.items():
        by_class[name] = _with_overrides(adapter, name, options, problems)
    present = frozenset(class_names(modules))
    used = {options_for(info, by_class, present) for info in selected.values()}
    problems += [_unused(name, selected) for name in by_class if name not in used]
    if problems:
        raise ConfigError(problems)
    return Resolver(adapter, by_class, modules, present)


def _with_overrides(adapter: Adapter, module: str, options: Mapping[str, Any], problems: list[Problem]) -> Adapter:
    key = f"adapter.by_module.{module}"
    changes: dict[str, Any] = {}
    for name, value in options.items():
        if name in FIELDS:
            changes[FIELDS[name]] = value
        elif name == "algo" and (kind := kind_of_algo(value)) is not None:
            changes["kind"] = kind
        elif name == "algo":
            known = lycoris_names()
            hint = misspelt(value, known, "choose one of them")
            problems.append(Problem(f"{key}.algo", str(value), f"one of {', '.join(known)}", hint))
        else:
            expected = f"one of {', '.join(OPTIONS)}"
            problems.append(Problem(f"{key}.{name}", str(value), expected, misspelt(name, OPTIONS)))
    try:
        return Adapter(**{**adapter.model_dump(), **changes})
    except ValidationError as error:
        written = {FIELDS.get(name, name): name for name in options}
        problems += [
            Problem(f"{key}.{written.get(str(fault['loc'][0]), '')}", str(fault["input"]), fault["msg"], "correct it")
            for fault in error.errors()
        ]
        return adapter


def _unused(name: str, selected: Modules) -> Problem:
    classes = class_names(selected)
    expected = f"a class around some targeted layer: {', '.join(classes[:12])}"
    return Problem(f"adapter.by_module.{name}", "no targeted layer is inside one", expected, misspelt(name, classes))
