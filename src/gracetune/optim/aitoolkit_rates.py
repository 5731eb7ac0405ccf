"""Import the learning rates of an ai-toolkit run with Automagic from its `optimizer.pt` (`optimizer.rates_from`).

    {"state": {0: {"lr_mask": {"quantized": int8, "scale": float, ...}, "last_polarity": bool, ...}, ...},
     "param_groups": [{"params": [0, ...], ...}]}

The file numbers parameters and does not name them. ai-toolkit numbers them in the order of the model's modules: the
high-noise expert before the low-noise expert, and within a layer lora_down before lora_up, or LoKr's first factor
before its second. Our parameters have the same order, so number N gets the name of our Nth parameter. Rates are
imported only if the number of parameters and every shape agree. A run of one expert of a pair is rejected, because the
file does not name the expert of a parameter. torch loads the file with `weights_only`: no code in it runs.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 (the error torch raises; nothing is unpickled here)
from typing import Any

import torch
from torch import Tensor

from gracetune.errors import GracetuneError, Problem
from gracetune.optim.named_state import differences
from gracetune.storage.regular_files import check_regular

KINDS = ("lora", "lokr")
"""Adapter kinds whose layers order their parameters alike in ai-toolkit and here."""


class NotImportableError(GracetuneError):
    """The rates of an optimizer.pt cannot be assigned to this run's parameters.

    The run starts only after `optimizer.rates_from` is removed.
    """

    def __init__(self, message: str, problem: Problem) -> None:
        super().__init__(message)
        self.problem = problem


@dataclass(frozen=True, eq=False)
class ImportedRates:
    """Imported learning rates and last update signs, by our parameter names."""

    path: Path
    rates: Mapping[str, Tensor]
    signs: Mapping[str, Tensor]

    def __str__(self) -> str:
        lowest = min(float(rate.min()) for rate in self.rates.values())
        highest = max(float(rate.max()) for rate in self.rates.values())
        return f"{len(self.rates)} parameters start with the rates of {self.path}, {lowest:.2g} to {highest:.2g}"


def read_rates(path: Path, shapes: Mapping[str, tuple[int, ...]], *, kind: str, single_expert: bool) -> ImportedRates:
    """Read `path` and match its numbered parameters with ours.

    Called before anything is loaded: `shapes` holds every parameter that the run trains, in the model's order.
    `single_expert`: the run trains only one expert of a pair.
    """
    if kind not in KINDS:
        raise _import_error(path, f"a run with an adapter of kind {kind}", f"one of kind {' or '.join(KINDS)}")
    saved = _open(path)
    state, groups = saved.get("state"), saved.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, Sequence):
        raise _import_error(path, "no optimizer state")
    if single_expert:
        found = "parameters by number only, so their expert is unknown"
        raise _import_error(path, found, "a run that trains both experts, and a file of such a run")
    numbers = [number for group in groups for number in _parameters(path, group)]
    if len(numbers) != len(shapes):
        expected = f"the {len(shapes)} that this run trains (the same layers, experts and kind of adapter)"
        raise _import_error(path, f"{len(numbers)} parameters", expected)
    rates, signs = {}, {}
    for number, name in zip(numbers, shapes, strict=True):
        entry = state.get(number)
        if not isinstance(entry, Mapping):
            raise _import_error(path, f"no state of parameter {number} ({name})")
        rate = _dequantized(entry.get("lr_mask"))
        if rate is None or not bool(rate.isfinite().all()):
            raise _import_error(path, f"no usable lr_mask for parameter {number} ({name})")
        rates[name] = rate
        if isinstance(entry.get("last_polarity"), Tensor):
            signs[name] = entry["last_polarity"].bool()
    for tensors in (rates, {**rates, **signs}):
        wrong = differences(shapes, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        if wrong:
            raise _import_error(
                path, f"parameters of other sizes:\n{wrong}\n ", "those of this run (the same rank and model)"
            )
    return ImportedRates(path, rates, signs)


def _parameters(path: Path, group: object) -> Sequence[int]:
    numbers = group.get("params") if isinstance(group, Mapping) else None
    if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
        raise _import_error(path, "a group without a list of its parameters")
    return numbers


def _dequantized(mask: object) -> Tensor | None:
    """Rates as float32; ai-toolkit stores them as int8 with one scale per tensor, or as a tensor. None if neither."""
    if isinstance(mask, Tensor):
        return mask.float()
    if not isinstance(mask, Mapping):
        return None
    values, scale = mask.get("quantized"), mask.get("scale")
    if not isinstance(values, Tensor) or not isinstance(scale, int | float | Tensor):
        return None
    return values.float() * float(scale)


def _open(path: Path) -> Mapping[str, Any]:
    try:
        check_regular(path)
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise _import_error(path, "no such file") from error
    except (UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _import_error(path, f"a file that cannot be read safely ({first})") from error
    if not isinstance(saved, Mapping):
        raise _import_error(path, f"a {type(saved).__name__} instead of an optimizer state")
    return saved


def _import_error(path: Path, found: str, expected: str = "the state of ai-toolkit's Automagic") -> NotImportableError:
    key = "optimizer.rates_from"
    hint = "--set optimizer.rates_from=null; Automagic then finds its rates again from `lr`"
    return NotImportableError(
        f"{key}: {path}: found {found}; expected {expected}. To start without it: {hint}",
        Problem(key, found, expected, hint, str(path)),
    )
