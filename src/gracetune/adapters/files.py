"""An adapter's safetensors file: read whole or refused, written whole or not at all, never over another."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gracetune.adapters.file_errors import UnreadableAdapterError
from gracetune.adapters.formats.diffusers import PEFT_CONFIG
from gracetune.errors import ConfigError, Problem
from gracetune.storage.errors import WeightFileError
from gracetune.storage.os_errors import FileError, problem_of
from gracetune.storage.safetensors_files import file_pieces, in_file_order, read_tensors, tensor_bytes, write_tensors
from gracetune.storage.safetensors_headers import open_weights

SUFFIX = ".safetensors"
_PEFT_FILE, _PEFT_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_CHECKPOINT_FILES = ("parameters.safetensors", "ema.safetensors")
_PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_LEGACY_START, _LEGACY_LENGTH = 0x100000, 0x10000


@dataclass(frozen=True, eq=False)
class AdapterFile:
    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def read(path: Path) -> AdapterFile:
    """The tensors and the header of one file. Nothing in it is run; a pickle is refused by its content."""
    if path.is_dir():
        inside = path / _PEFT_FILE
        if not inside.is_file():
            found = sorted(entry.name for entry in path.iterdir() if entry.suffix == SUFFIX)
            hint = f"name the file: {found[0]}" if found else "name the adapter's file itself"
            raise _unreadable(path, "a folder", "a safetensors file", hint)
        path = inside
    _refuse_pickle(path)
    try:
        header = open_weights(path)
    except WeightFileError as error:
        raise UnreadableAdapterError(error.problems) from None
    odd = sorted({entry.dtype for entry in header.entries.values()} - set(_DTYPES.values()))
    if odd:
        hint = "save it in bf16, fp16 or fp32 where it was made"
        raise _unreadable(path, f"numbers of type {', '.join(odd)}", f"one of {', '.join(_DTYPES.values())}", hint)
    tensors = read_tensors(path)
    metadata = dict(header.metadata)
    config = path.with_name(_PEFT_CONFIG_FILE)
    if path.name == _PEFT_FILE and config.is_file():
        metadata[PEFT_CONFIG] = config.read_text(encoding="utf-8", errors="replace")
    if path.name in _CHECKPOINT_FILES:
        tensors |= _alphas_beside(path)
    return AdapterFile(path, tensors, metadata)


def _alphas_beside(path: Path) -> dict[str, Tensor]:
    """What `train.pieces` wrote beside a checkpoint's tensors. Without it their scale is unknown, and they are refused
    for that later on."""
    try:
        found = json.loads(path.with_suffix(".json").read_bytes())
    except (OSError, ValueError, RecursionError):  # the last: brackets nested by the thousand
        return {}
    alphas = found.get("alphas") if isinstance(found, dict) else None
    if not isinstance(alphas, dict):
        return {}
    return {f"{layer}.alpha": torch.tensor(alpha) for layer, alpha in alphas.items() if isinstance(alpha, float)}


def _refuse_pickle(path: Path) -> None:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a named pipe would wait for a writer
            raise _unreadable(path, "not a regular file", "a safetensors file", "copy it first")
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error), "a readable file", "check the path") from None
    # The length of a safetensors header can begin with the same bytes as a pickle, but then a brace follows it.
    safetensors = start[8:] == b"{"
    if not safetensors and (start.startswith(_PICKLE_STARTS) or (path.suffix in _PICKLE_SUFFIXES and start)):
        hint = "convert it to safetensors where it was made, by someone who trusts it"
        raise _unreadable(path, "a pickle: loading it would run the code in it", "a safetensors file", hint)


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
    """Appears under its name complete and on the disk, or does not appear. A file that is there stays as it is."""
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
        elsewhere = "choose another place (output_dir of a run, --output of a command)"
        raise FileError(problem_of(error, "file not written", path, elsewhere=elsewhere)) from error


# -- the bytes --------------------------------------------------------------------------------------------------------


def data_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the file's data, that is of all bytes behind the header."""
    digest = hashlib.sha256()
    for _, tensor in in_file_order(tensors):
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def legacy_hash(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """The old A1111 hash: 64 KiB from the first MiB on, of the file with this header."""
    digest, position = hashlib.sha256(), 0
    for piece in file_pieces(tensors, metadata):
        begin = max(0, _LEGACY_START - position)
        end = max(0, _LEGACY_START + _LEGACY_LENGTH - position)
        digest.update(piece[begin:end])
        position += len(piece)
        if position >= _LEGACY_START + _LEGACY_LENGTH:
            break
    return digest.hexdigest()[:8]


def _unreadable(path: Path, found: str, expected: str, hint: str) -> UnreadableAdapterError:
    return UnreadableAdapterError([Problem("file", found, expected, hint, str(path))])


def _exists(path: Path) -> ConfigError:
    return ConfigError(
        [Problem("--output", "a file of this name", "a name that is free", "another --output", str(path))]
    )
