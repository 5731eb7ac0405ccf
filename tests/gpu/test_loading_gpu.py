"""Weights into GPU memory, through the pinned ring."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gracetune.memory.weights import loading
from gracetune.memory.weights.loading import load_into, open_weights
from gracetune.storage.safetensors_files import TORCH_DTYPES
from gracetune.storage.safetensors_headers import WeightFileError
from gracetune.units import MIB

pytestmark = pytest.mark.gpu
CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}


def save_file(tensors: dict[str, Tensor], path: Path) -> None:
    """By hand: a machine with PyTorch's own stack alone has no safetensors library."""
    header, parts, end = {}, [], 0
    for name, tensor in tensors.items():
        parts.append(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        offsets = [end, end + len(parts[-1])]
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same_bits(one: Tensor, two: Tensor) -> bool:
    def raw(tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)

    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(raw(one), raw(two))


@pytest.mark.parametrize("code", TORCH_DTYPES)
def test_every_dtype_arrives_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(loading, "CHUNK", 4096)  # many pieces, so that the ring goes round many times
    tensors = {f"t{n}": noise(61, 97, dtype=TORCH_DTYPES[code], seed=n) for n in range(5)}
    save_file(tensors, tmp_path / "a")
    found = {name: torch.empty_like(tensor, device="cuda:0") for name, tensor in tensors.items()}
    load_into(open_weights(tmp_path / "a"), found)
    assert all(same_bits(found[name], tensors[name]) for name in tensors)


def test_large_pieces_with_reading_and_copying_under_way_at_once(tmp_path: Path) -> None:
    tensors = {f"t{n}": noise(40 * MIB, dtype=torch.uint8, seed=n) for n in range(8)}
    save_file(tensors, tmp_path / "a")
    found = {name: torch.zeros_like(tensor, device="cuda:0") for name, tensor in tensors.items()}
    load_into(open_weights(tmp_path / "a"), found)
    assert all(same_bits(found[name], tensors[name]) for name in tensors)


def test_comes_after_what_was_queued_for_the_destination_before(tmp_path: Path) -> None:
    tensor = noise(64 * MIB, dtype=torch.uint8)
    save_file({"a": tensor}, tmp_path / "a")
    found = torch.empty_like(tensor, device="cuda:0")
    torch.cuda._sleep(500_000_000)  # a fraction of a second of GPU time, before the fill below can begin
    found.fill_(7)
    load_into(open_weights(tmp_path / "a"), {"a": found})
    assert same_bits(found, tensor)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_another_dtype_and_a_view_that_is_not_contiguous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: torch.dtype
) -> None:
    monkeypatch.setattr(loading, "CHUNK", 4096)
    tensors = {"plain": torch.randn(300, 200), "turned": torch.randn(300, 200)}
    save_file(tensors, tmp_path / "a")
    found = {
        "plain": torch.empty(300, 200, dtype=target, device="cuda:0"),
        "turned": torch.empty(200, 300, dtype=target, device="cuda:0").T,
    }
    report = load_into(open_weights(tmp_path / "a"), found)
    assert all(same_bits(found[name], tensors[name].to(target)) for name in tensors)
    assert set(report.converted) == {"plain", "turned"}


def test_some_on_the_gpu_and_some_in_main_memory(tmp_path: Path) -> None:
    tensors = {"cpu": noise(1000, dtype=torch.int32), "cuda": noise(1000, dtype=torch.int32, seed=1)}
    save_file(tensors, tmp_path / "a")
    found = {name: torch.empty_like(tensor, device=name) for name, tensor in tensors.items()}
    load_into(open_weights(tmp_path / "a"), found)
    assert all(same_bits(found[name], tensors[name]) for name in tensors)


def test_parameters_of_a_module(tmp_path: Path) -> None:
    source, target = torch.nn.Linear(64, 32), torch.nn.Linear(64, 32).to("cuda:0")
    save_file(source.state_dict(), tmp_path / "a")
    load_into(open_weights(tmp_path / "a"), dict(target.named_parameters()))
    assert same_bits(target.weight, source.weight)


def test_a_value_that_does_not_fit_is_rejected_and_the_gpu_still_works(tmp_path: Path) -> None:
    save_file({"a": torch.full((1000,), 1e6)}, tmp_path / "a")
    with pytest.raises(WeightFileError, match=r"largest torch\.float16 holds"):
        load_into(open_weights(tmp_path / "a"), {"a": torch.empty(1000, dtype=torch.float16, device="cuda:0")})
    assert float(torch.ones(4, device="cuda:0").sum()) == 4.0
