"""Merges adapters into the weights they were trained on: in a model in memory, or from one folder into a new one.

A merged folder has the layout diffusers saves: `config.json`, and `diffusion_pytorch_model.safetensors` or numbered
shards with an index. It holds the same tensors as the source, each in its original precision. Only one tensor at a time
is in memory. The write is atomic: a temporary folder, fsync, rename.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from gracetune.adapters.delta import apply, bias_delta, misfit
from gracetune.adapters.state import AdapterState, Layer
from gracetune.errors import ConfigError, GracetuneError, Problem
from gracetune.memory.weights.loading import torch_dtype
from gracetune.storage.atomic import new_folder, write_new
from gracetune.storage.regular_files import open_regular, read_small_file
from gracetune.storage.safetensors_files import tensor_bytes
from gracetune.storage.safetensors_headers import (
    TensorEntry,
    WeightFiles,
    describe,
    open_weights,
    pack_header,
    read_fully,
    shortened,
)
from gracetune.units import GIB

STEM = "diffusion_pytorch_model"
SHARD_BYTES = 10 * GIB
"""diffusers' own limit for one file."""
_MERGEABLE = ("F64", "F32", "F16", "BF16")
_CONFIG = "config.json"


@dataclass(frozen=True)
class Weighted:
    """An adapter and the strength to merge it with."""

    state: AdapterState
    strength: float = 1.0


Adapters = AdapterState | Weighted | Sequence[AdapterState | Weighted]


@dataclass(frozen=True)
class MergeReport:
    folder: Path
    files: tuple[str, ...]
    changed: tuple[str, ...]
    """Names of the tensors that differ from the source."""
    tensors: int
    """Number of all tensors, changed or not."""


def merge_into(
    adapters: Adapters, source: Path, out: Path, *, variant: str | None = None, shard_bytes: int = SHARD_BYTES
) -> MergeReport:
    """Merge into the weights of a denoiser's folder (`transformer`, `unet`) and write the result to a new folder.

    Several adapters are applied one after the other, in the given order.
    """
    weights = open_weights(_weight_file(source, variant))
    shapes = {name: entry.shape for name, entry in weights.entries.items()}
    changes = _changes(_as_list(adapters), shapes, str(source))
    unfit = [
        Problem(
            name, entry.dtype, f"one of {', '.join(_MERGEABLE)}", "merge into the weights as published", str(source)
        )
        for name, entry in weights.entries.items()
        if name in changes and entry.dtype not in _MERGEABLE
    ]
    if unfit:
        raise ConfigError(shortened(unfit))
    with _new_folder(out) as folder:
        if (source / _CONFIG).is_file():
            write_new(folder / _CONFIG, [read_small_file(source / _CONFIG)])
        files = _write_shards(weights, changes, folder, shard_bytes)
    return MergeReport(out, files, tuple(name for name in weights.entries if name in changes), len(weights.entries))


@torch.no_grad()
def merge_module(adapters: Adapters, model: nn.Module) -> tuple[str, ...]:
    """Merge in place into a model that has no attached adapter. Returns the names of the changed parameters."""
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    changes = _changes(_as_list(adapters), shapes, type(model).__name__)
    for name, change in changes.items():
        parameters[name].copy_(_merge_tensor(name, parameters[name], change))
    return tuple(changes)


# -- the change of each tensor ----------------------------------------------------------------------------------------

Change = list[tuple[Layer, float, bool]]
"""The layers to apply to one tensor, each with its strength and whether the tensor is the layer's bias."""


def _as_list(adapters: Adapters) -> list[Weighted]:
    several = [adapters] if isinstance(adapters, AdapterState | Weighted) else list(adapters)
    return [one if isinstance(one, Weighted) else Weighted(one) for one in several]


def _changes(adapters: Sequence[Weighted], shapes: Mapping[str, tuple[int, ...]], location: str) -> dict[str, Change]:
    """The changes by tensor name. Every misfit is reported here, before anything is written."""
    changes: dict[str, Change] = {}
    problems: list[Problem] = []
    for adapter in adapters:
        for path, layer in adapter.state.layers.items():
            biased = bias_delta(layer) is not None
            for name, is_bias in ((f"{path}.weight", False), (f"{path}.bias", True)):
                if is_bias and not biased:
                    continue
                if name not in shapes:
                    problems.append(_missing_problem(name, location))
                elif not _fits(layer, shapes[name], is_bias):
                    problems.append(_misfit_problem(name, layer, shapes[name], location))
                changes.setdefault(name, []).append((layer, adapter.strength, is_bias))
    if problems:
        raise ConfigError(shortened(problems))
    return changes


def _fits(layer: Layer, shape: tuple[int, ...], is_bias: bool) -> bool:
    if not is_bias:
        return misfit(layer, shape) is None
    bias = bias_delta(layer)
    return bias is not None and tuple(bias.shape) == shape


def _merge_tensor(name: str, tensor: Tensor, change: Change) -> Tensor:
    merged = tensor.detach().float()
    try:
        for layer, strength, is_bias in change:
            bias = bias_delta(layer)
            merged = (
                merged + strength * bias.to(merged.device)
                if is_bias and bias is not None
                else apply(layer, merged, strength=strength)
            )
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # Diag-OFT: 1 - Q was singular in fp32
        hint = "take an earlier checkpoint: the training run has diverged"
        raise ConfigError([Problem(name, "a change beyond the range of numbers", "finite numbers", hint)]) from None
    result = merged.to(tensor.dtype)
    if not result.isfinite().all() and tensor.isfinite().all():
        found = f"infinity or NaN in {tensor.dtype} after merging the adapter"
        hint = "weights in bf16 or fp32 if these are fp16; else an earlier checkpoint: the training run has diverged"
        raise ConfigError([Problem(name, found, "finite numbers", hint)])
    return result


def _missing_problem(name: str, location: str) -> Problem:
    return Problem(
        name, "the adapter changes it", "a tensor of this model", "merge into the model it was trained on", location
    )


def _misfit_problem(name: str, layer: Layer, shape: tuple[int, ...], location: str) -> Problem:
    tensors = ", ".join(f"{key} {list(tensor.shape)}" for key, tensor in layer.tensors.items())
    return Problem(name, f"{layer.algorithm} ({tensors})", f"one for a tensor {list(shape)}",
                   "merge into the model it was trained on", location)  # fmt: skip


# -- files ------------------------------------------------------------------------------------------------------------


def _weight_file(folder: Path, variant: str | None) -> Path:
    middle = f".{variant}" if variant else ""
    candidates = (f"{STEM}{middle}.safetensors", f"{STEM}.safetensors.index{middle}.json",
                  f"{STEM}{middle}.safetensors.index.json")  # fmt: skip
    for name in candidates:
        if (folder / name).is_file():
            return folder / name
    found = "no such folder"
    if folder.is_dir():
        held = sorted(path.name for path in folder.iterdir())
        found = f"it holds {', '.join(held[:8])}" if held else "it is empty"
    raise ConfigError([Problem("source", f"{folder}: {found}", f"{candidates[0]}, or its shards and their index",
                               "give the folder of the denoiser: transformer, transformer_2 or unet")])  # fmt: skip


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    if out.exists() or out.is_symlink():
        raise ConfigError([Problem("out", f"{out} exists", "a folder that does not exist yet", "give another name")])
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(out, files_synced=True) as unfinished:
            yield unfinished
    except OSError as error:
        raise GracetuneError(
            f"{out} cannot be written: {error.strerror or error}\n  try  look at `df -h` of it"
        ) from error


def _write_shards(weights: WeightFiles, changes: Mapping[str, Change], folder: Path, limit: int) -> tuple[str, ...]:
    shards = _shards(list(weights.entries.values()), limit)
    names = [f"{STEM}.safetensors"]
    if len(shards) > 1:
        names = [f"{STEM}-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
    for name, entries in zip(names, shards, strict=True):
        _write_shard(folder / name, entries, changes)
    if len(shards) == 1:
        return tuple(names)
    index = {
        "metadata": {"total_size": weights.size},
        "weight_map": {entry.name: name for name, entries in zip(names, shards, strict=True) for entry in entries},
    }
    text = json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"
    write_new(folder / f"{STEM}.safetensors.index.json", [text])
    return (*names, f"{STEM}.safetensors.index.json")


def _shards(entries: list[TensorEntry], limit: int) -> list[list[TensorEntry]]:
    shards: list[list[TensorEntry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(other.size for other in shards[-1]) + entry.size > limit:
            shards.append([])
        shards[-1].append(entry)
    return shards


def _write_shard(path: Path, entries: Sequence[TensorEntry], changes: Mapping[str, Change]) -> None:
    # The safetensors order, wide dtypes first, keeps every tensor aligned.
    ordered = sorted(entries, key=lambda entry: (-entry.size // max(1, math.prod(entry.shape)), entry.name))
    lines: dict[str, object] = {}
    end = 0
    for entry in ordered:
        lines[entry.name] = describe(entry.dtype, entry.shape, end, end + entry.size)
        end += entry.size
    header = pack_header(lines, {"format": "pt"}, ascii_only=True)
    tensors = (_merged_bytes(entry, changes.get(entry.name)) for entry in ordered)
    write_new(path, chain([header], tensors))


def _merged_bytes(entry: TensorEntry, change: Change | None) -> memoryview:
    data = _read(entry)
    if change is None or not data:
        return memoryview(data)
    tensor = torch.frombuffer(data, dtype=torch_dtype(entry)).reshape(entry.shape)
    return tensor_bytes(_merge_tensor(entry.name, tensor, change))


def _read(entry: TensorEntry) -> bytearray:
    data = bytearray(entry.size)
    try:
        with os.fdopen(open_regular(entry.path), "rb", buffering=0) as file:
            got = read_fully(file.fileno(), memoryview(data), entry.start)
    except OSError as error:
        raise GracetuneError(f"{entry.path} cannot be read: {error.strerror or error}") from error
    if got < entry.size:
        raise GracetuneError(f"{entry.path} became shorter while it was read: download it again")
    return data
