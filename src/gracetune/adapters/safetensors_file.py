"""Reads and writes the safetensors file of an adapter.

A file is read completely or rejected. A write is atomic and never replaces an existing file.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gracetune.adapters.algorithms.assembly import LayerError, checked_alpha
from gracetune.adapters.errors import UnreadableAdapterError
from gracetune.errors import ConfigError, Problem, short
from gracetune.storage.os_errors import FileError, problem_of
from gracetune.storage.regular_files import open_regular, read_small_file
from gracetune.storage.safetensors_files import (
    SafetensorError,
    file_chunks,
    in_file_order,
    read_tensors,
    tensor_bytes,
    write_tensors,
)
from gracetune.storage.safetensors_headers import WeightFileError, WeightFiles, open_weights
from gracetune.units import format_bytes

SUFFIX = ".safetensors"
PEFT_CONFIG = "gracetune.adapter_config"
"""The metadata entry that holds the text of the adapter_config.json beside PEFT's adapter_model.safetensors."""
HASH_ENTRY, OUR_ENTRY = "sshs_model_hash", "gracetune.format"
"""Header entries: the SHA-256 of the data, and the entry that every file written by gracetune has."""
_PEFT_FILE, _PEFT_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_CHECKPOINT_FILES = ("parameters.safetensors", "ema.safetensors")
_PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_LEGACY_START, _LEGACY_LENGTH = 0x100000, 0x10000
"""The part of a file that A1111's old hash covers: 64 KiB at 1 MiB."""


@dataclass(frozen=True, eq=False)
class AdapterFile:
    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    hash_matches: bool | None = None
    """Whether the header's `sshs_model_hash` is that of the data; None if it has none, or was not checked."""

    @property
    def is_ours(self) -> bool:
        """Whether gracetune wrote the file. Only then is it certain how the hash was computed."""
        return OUR_ENTRY in self.metadata


def read(path: Path, *, check_hash: bool = True) -> AdapterFile:
    """Read the tensors and the header of one file. A pickle is recognized by its content and rejected, never loaded.

    `check_hash`: compare the header's hash with the data, which takes about as long as reading them.
    """
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            path = _in_folder(path)
        _reject_pickle(path)
        header = open_weights(path)
        _check_numbers(path, header)
        tensors = read_tensors(path)
        beside = _read_beside(path)
    except WeightFileError as error:
        raise UnreadableAdapterError(error.problems) from None
    except SafetensorError as error:  # a fault that our own check of the header did not find
        raise _unreadable(path, short(str(error)), "a safetensors file", "save it again where it was made") from None
    except (OSError, MemoryError, ValueError) as error:  # ValueError: a null character in the name
        found = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _unreadable(path, found, "a readable file", "check the path and its permissions") from None
    matches = _hash_matches(header, tensors) if check_hash else None
    return AdapterFile(path, {**tensors, **beside.alphas}, {**header.metadata, **beside.metadata}, matches)


def _in_folder(folder: Path) -> Path:
    inside = folder / _PEFT_FILE
    if inside.is_file():
        return inside
    found = sorted(entry.name for entry in folder.iterdir() if entry.suffix == SUFFIX)
    hint = f"name the file: {found[0]}" if found else "name the adapter's file itself"
    raise _unreadable(folder, "a folder", "a safetensors file", hint)


def _check_numbers(path: Path, header: WeightFiles) -> None:
    """Check dtypes and total size by the header, before any tensor is read."""
    odd = sorted({entry.dtype for entry in header.entries.values()} - set(_DTYPES.values()))
    if odd:
        hint = "save it in bf16, fp16 or fp32 where it was made"
        raise _unreadable(path, f"tensors of type {', '.join(odd)}", f"one of {', '.join(_DTYPES.values())}", hint)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if header.size > memory:  # a sparse file can be larger than the disk it is on
        found = f"{format_bytes(header.size)} of tensors"
        expected = f"an adapter that fits into the {format_bytes(memory)} of this machine"
        raise _unreadable(path, found, expected, "check where it comes from: adapters have some gigabytes at most")


@dataclass(frozen=True)
class _Beside:
    """The scale of an adapter, from a JSON file beside the tensors."""

    metadata: Mapping[str, str]
    alphas: Mapping[str, Tensor]


def _read_beside(path: Path) -> _Beside:
    """Read PEFT's `adapter_config.json`, or the JSON that `train.state_parts` wrote beside a checkpoint's tensors.

    If there is none, the scale is unknown and the reader rejects the layers later.
    """
    if path.name not in (_PEFT_FILE, *_CHECKPOINT_FILES):
        return _Beside({}, {})
    config = path.with_name(_PEFT_CONFIG_FILE) if path.name == _PEFT_FILE else path.with_suffix(".json")
    try:
        text = read_small_file(config).decode(errors="replace")
    except FileNotFoundError:
        return _Beside({}, {})
    except OSError as error:
        hint = f"put there what was saved with {path.name}, or remove it"
        raise _unreadable(config, error.strerror or str(error), "a readable file", hint) from None
    return _Beside({PEFT_CONFIG: text}, {}) if path.name == _PEFT_FILE else _Beside({}, _alphas_in(config, text))


def _alphas_in(path: Path, text: str) -> dict[str, Tensor]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: thousands of nested brackets
        return {}
    alphas = found.get("alphas") if isinstance(found, dict) else None
    if not isinstance(alphas, dict):
        return {}
    try:
        return {f"{layer}.alpha": torch.tensor(checked_alpha(alpha)) for layer, alpha in alphas.items()}
    except LayerError as fault:
        raise _unreadable(
            path, str(fault), "a number for each layer", "take the checkpoint as it was written"
        ) from None


def _hash_matches(header: WeightFiles, tensors: Mapping[str, Tensor]) -> bool | None:
    """Whether the stored hash fits the tensors in this file's order or in the order we write.

    Another program that rewrites the file may keep the header but order the tensors differently.
    """
    stored_hash = header.metadata.get(HASH_ENTRY, "").strip().lower()
    if not stored_hash:
        return None
    return stored_hash == data_hash(tensors) or stored_hash == _digest(tensors[name] for name in header.entries)


def _reject_pickle(path: Path) -> None:
    with os.fdopen(open_regular(path), "rb") as file:
        start = file.read(9)
    # The length of a safetensors header can begin with the same bytes as a pickle, but then a brace follows it.
    safetensors = start[8:] == b"{"
    if not safetensors and (start.startswith(_PICKLE_STARTS) or (path.suffix in _PICKLE_SUFFIXES and start)):
        hint = "convert it to safetensors where it was made, by someone who trusts it"
        raise _unreadable(path, "a pickle: loading it would run the code in it", "a safetensors file", hint)


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
    """Write a new file atomically and durably. Raises `ConfigError` if the path exists."""
    try:
        if path.exists():
            raise _exists(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_tensors(path, tensors, metadata, replace=False)
        except FileExistsError:
            raise _exists(path) from None
        return path
    except OSError as error:
        elsewhere = "write it to another folder"
        raise FileError(problem_of(error, "file not written", path, elsewhere=elsewhere)) from error


# -- the bytes --------------------------------------------------------------------------------------------------------


def data_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the file's data: all bytes after the header."""
    return _digest(tensor for _, tensor in in_file_order(tensors))


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def legacy_hash(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """A1111's old hash, over 64 KiB at 1 MiB of the file with this header."""
    digest, position = hashlib.sha256(), 0
    for part in file_chunks(tensors, metadata):
        begin = max(0, _LEGACY_START - position)
        end = max(0, _LEGACY_START + _LEGACY_LENGTH - position)
        digest.update(part[begin:end])
        position += len(part)
        if position >= _LEGACY_START + _LEGACY_LENGTH:
            break
    return digest.hexdigest()[:8]


def _unreadable(path: Path, found: str, expected: str, hint: str) -> UnreadableAdapterError:
    return UnreadableAdapterError([Problem("file", found, expected, hint, str(path))])


def _exists(path: Path) -> ConfigError:
    hint = "move it away, or choose another name (gracetune adapter convert FILE --output NAME)"
    return ConfigError([Problem("output file", "a file of this name", "a name that is free", hint, str(path))])
