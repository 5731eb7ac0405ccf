"""Reading and writing tensors in safetensors files.

The same tensors must give the same bytes. The safetensors library writes metadata in a different order each time, so we
write the files ourselves. `storage.safetensors_headers` describes the format. Our files sort the tensors with the
widest dtype first, so that every tensor is aligned, and pad the header with spaces to a multiple of 8 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError as SafetensorError
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from gracetune.storage.atomic import write_file
from gracetune.storage.regular_files import check_regular
from gracetune.storage.safetensors_headers import describe, pack_header

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, replace: bool = True
) -> None:
    """Write a safetensors file atomically, as `write_file` does."""
    write_file(path, file_chunks(tensors, metadata), replace=replace)


def file_chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """Yield the bytes of the file: the header, then one tensor at a time, so that gigabytes are not held twice."""
    lines: dict[str, Any] = {}
    end = 0
    for name, tensor in in_file_order(tensors):
        begin, end = end, end + tensor.numel() * tensor.element_size()
        lines[name] = describe(DTYPE_NAMES[tensor.dtype], tensor.shape, begin, end)
    yield memoryview(pack_header(lines, dict(sorted((metadata or {}).items()))))
    for _, tensor in in_file_order(tensors):
        yield tensor_bytes(tensor)


def in_file_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Tensors by falling element size, then by name. Each then starts at a multiple of its element size."""
    return sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's values as bytes. A contiguous CPU tensor is not copied."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Load all tensors to the CPU. They may be memory-mapped from the file: clone tensors that must outlive it."""
    check_regular(path)
    with _mapping_explained():
        return load_file(path)


def open_tensors(path: Path) -> Any:
    """A context manager whose `get_tensor(name)` reads one tensor. Raises SafetensorError if the file is invalid."""
    check_regular(path)
    with _mapping_explained():
        return safe_open(path, framework="pt")


@contextmanager
def _mapping_explained() -> Iterator[None]:
    """Turn torch's RuntimeError for a file that the operating system cannot map into an OSError."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(str(error)) from error
