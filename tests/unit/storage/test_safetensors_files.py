from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gracetune.storage.safetensors_files import TORCH_DTYPES, open_tensors, read_tensors, write_tensors
from gracetune.storage.safetensors_headers import open_weights


def made(dtypes: list[torch.dtype]) -> dict[str, Tensor]:
    values = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    tensors = {f"block.{number}.weight": values.to(dtype) for number, dtype in enumerate(dtypes)}
    return {**tensors, "a.bias": torch.zeros(0), "b.scale": torch.tensor(2.0), "ü": torch.ones(3)}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_safetensors_library_reads_the_same_tensors_and_metadata(
    metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    tensors = made([torch.bfloat16, torch.float32, torch.int64, torch.bool])
    write_tensors(tmp_path / "ours", tensors, metadata)
    save_file(tensors, tmp_path / "theirs", metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_every_dtype_round_trips(tmp_path: Path) -> None:
    bits = torch.arange(24, dtype=torch.uint8)
    tensors = {
        name: bits[: 24 // dtype.itemsize * dtype.itemsize].to(torch.bool if dtype == torch.bool else torch.uint8)
        .clone().view(dtype)
        for name, dtype in TORCH_DTYPES.items()
    }  # fmt: skip
    write_tensors(tmp_path / "file.safetensors", tensors)
    found = read_tensors(tmp_path / "file.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == TORCH_DTYPES
    for name, tensor in tensors.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
    with open_tensors(tmp_path / "file.safetensors") as file:
        assert torch.equal(file.get_tensor("F32"), tensors["F32"])


def test_non_contiguous_tensors_are_written_by_value(tmp_path: Path) -> None:
    turned = torch.arange(6.0).reshape(2, 3).T
    write_tensors(tmp_path / "file.safetensors", {"turned": turned}, {"b": "2", "a": "1"})
    assert torch.equal(read_tensors(tmp_path / "file.safetensors")["turned"], turned)
    assert dict(open_weights(tmp_path / "file.safetensors").metadata) == {"a": "1", "b": "2"}
