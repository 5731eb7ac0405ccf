"""Checks that the tensors in weight files fit their destinations. All problems are found before anything is read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch
from torch import Tensor

from gracetune.errors import Problem
from gracetune.storage.safetensors_files import TORCH_DTYPES
from gracetune.storage.safetensors_headers import TensorEntry, WeightFileError, WeightFiles, shortened


def torch_dtype(entry: TensorEntry) -> torch.dtype:
    if entry.dtype not in TORCH_DTYPES:
        raise WeightFileError([_no_such_dtype(entry)])
    return TORCH_DTYPES[entry.dtype]


def find_problems(weights: WeightFiles, destinations: Mapping[str, Tensor], unused: tuple[str, ...]) -> list[Problem]:
    found = {name: weights.entries[name] for name in destinations if name in weights.entries}
    mismatches = (_mismatch(entry, destinations[name]) for name, entry in found.items())
    return [
        *shortened(_missing(weights, [name for name in destinations if name not in found])),
        *shortened([_unused(weights.entries[name]) for name in unused]),
        *shortened([problem for problem in mismatches if problem is not None]),
        *shortened(_shared_memory(destinations)),
    ]


def _missing(weights: WeightFiles, names: list[str]) -> list[Problem]:
    problems = []
    for position, name in enumerate(names):
        # Searching for a similar name is slow, and users read only the first few problems.
        near = difflib.get_close_matches(name, weights.entries, n=1) if position < 3 else []
        hint = f"is it {near[0]!r}?" if near else "check that these weights belong to this model"
        file = str(next(iter(weights.files), ""))
        problems.append(Problem(name, "no tensor of this name", "one for every destination", hint, file))
    return problems


def _unused(entry: TensorEntry) -> Problem:
    hint = "check that these weights belong to this model, or load with allow_unused"
    return Problem(
        entry.name, "a tensor without a destination", "a destination for every tensor", hint, str(entry.path)
    )


def _mismatch(entry: TensorEntry, tensor: Tensor) -> Problem | None:
    hint = "check that these weights belong to this model"
    unusable = _unusable(tensor)
    if unusable is not None:
        expected = "an allocated, strided tensor in main memory or on a CUDA GPU"
        return Problem(entry.name, f"a destination that {unusable}", expected, "allocate it first", str(entry.path))
    if entry.dtype not in TORCH_DTYPES:
        return _no_such_dtype(entry)
    if tuple(tensor.shape) != entry.shape:
        return Problem(entry.name, f"shape {entry.shape}", f"shape {tuple(tensor.shape)}", hint, str(entry.path))
    if not _convertible(TORCH_DTYPES[entry.dtype], tensor.dtype):
        found, expected = f"dtype {entry.dtype}", f"{tensor.dtype}, or one that converts to it without loss of meaning"
        return Problem(entry.name, found, expected, hint, str(entry.path))
    return None


def _unusable(tensor: Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(tensor):
        return "has no shape yet"
    if type(tensor.data) is not Tensor:
        return f"is a {type(tensor.data).__name__}, whose bytes are not its own"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"is on the device {tensor.device.type!r}"
    if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
        return "repeats the same memory (an expanded view)"
    return None


def _convertible(source: torch.dtype, target: torch.dtype) -> bool:
    if source == target:
        return True
    if torch.float8_e8m0fnu in (source, target):  # this dtype has only exponents: no sign and no zero
        return False
    if source.is_floating_point and target.is_floating_point:
        return True
    if any(d.is_floating_point or d.is_complex or d == torch.bool for d in (source, target)):
        return False
    narrow, wide = torch.iinfo(source), torch.iinfo(target)
    return wide.min <= narrow.min and narrow.max <= wide.max


def _shared_memory(destinations: Mapping[str, Tensor]) -> list[Problem]:
    """Reject destinations that share memory, because the order in which they are filled is undefined."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in destinations.items()
        if _unusable(tensor) is None and tensor.is_contiguous() and tensor.numel() > 0
    )
    problems = []
    last_device, furthest, owner = "", 0, ""
    for device, start, end, name in spans:
        if device == last_device and start < furthest:
            hint = "leave one of the two out, and tie them after loading"
            problems.append(Problem(name, f"a destination that shares memory with {owner}", "memory of its own", hint))
        if device != last_device or end > furthest:
            last_device, furthest, owner = device, end, name
    return problems


def _no_such_dtype(entry: TensorEntry) -> Problem:
    expected = f"one of {', '.join(TORCH_DTYPES)}"
    hint = "convert the file to a dtype torch can hold"
    return Problem(entry.name, f"dtype {entry.dtype}", expected, hint, str(entry.path))
