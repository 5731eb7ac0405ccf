"""Learning rates out of an ai-toolkit run's `optimizer.pt`.

    {"state": {0: {"lr_mask": {"quantized": int8, "scale": float, ...}, "last_polarity": bool, ...}, ...},
     "param_groups": [{"params": [0, ...], "param_names": [...] (where torch kept them), ...}]}

The file counts parameters and does not name them. Its rates are taken over only where names can be had: from the file
itself, or from the caller, in the file's order. A guess by position could put one expert's rates on the other.
The file is read without running anything in it (torch's `weights_only`).
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

from gracetune.errors import GracetuneError
from gracetune.optim.automagic import Automagic
from gracetune.optim.naming import differences


class NotImportableError(GracetuneError):
    """An optimizer.pt whose rates cannot be put where they belong; the run can start without it."""


@dataclass(frozen=True, eq=False)
class ImportedRates:
    """By the names they were found under."""

    rates: Mapping[str, Tensor]
    signs: Mapping[str, Tensor]


def read_rates(path: Path, names: Sequence[str] | None = None) -> ImportedRates:
    """`names`: of all parameters of the file in its order, where the file has none of its own."""
    held = _open(path)
    state, groups = held.get("state"), held.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, Sequence):
        raise _refused(path, "no optimizer's state")
    numbers = [number for group in groups for number in group["params"]]
    own = [name for group in groups for name in group.get("param_names", ())]
    called = [*names] if names is not None else own
    if not called:
        raise _refused(path, f"{len(numbers)} parameters by number only, so nothing says which layer each one is")
    if len(called) != len(numbers) or len(set(called)) != len(called):
        raise _refused(path, f"{len(numbers)} parameters, but {len(set(called))} names for them")
    rates, signs = {}, {}
    for number, name in zip(numbers, called, strict=True):
        entry = state.get(number, {})
        mask = entry.get("lr_mask")
        if mask is None:
            raise _refused(path, f"no lr_mask for {name}: this is not Automagic's state")
        rates[name] = _dequantized(mask)
        if isinstance(entry.get("last_polarity"), Tensor):
            signs[name] = entry["last_polarity"].bool()
    return ImportedRates(rates, signs)


def import_rates(optimizer: Automagic, path: Path, names: Sequence[str] | None = None) -> int:
    """Put them into an optimizer, whose parameters have to be exactly these; how many parameters that were."""
    found = read_rates(path, names)
    wrong = differences(optimizer.parameter_shapes(), {name: tuple(t.shape) for name, t in found.rates.items()})
    if wrong:
        raise _refused(path, f"other parameters than this run trains:\n{wrong}\n ")
    optimizer.load_rates(dict(found.rates), dict(found.signs))
    return len(found.rates)


def _dequantized(mask: Any) -> Tensor:
    if isinstance(mask, Tensor):
        return mask.float()
    rates: Tensor = mask["quantized"].float() * float(mask["scale"])
    return rates


def _open(path: Path) -> Mapping[str, Any]:
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise _refused(path, "no such file") from error
    except (UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _refused(path, f"a file that cannot be read safely ({first})") from error
    if not isinstance(held, Mapping):
        raise _refused(path, f"a {type(held).__name__}, no optimizer's state")
    return held


def _refused(path: Path, found: str) -> NotImportableError:
    return NotImportableError(
        f"{path}: found {found}; expected an ai-toolkit Automagic optimizer.pt whose parameters have names. "
        "Start without it: the adapter's weights are taken over, and Automagic finds its rates again from `lr`"
    )
