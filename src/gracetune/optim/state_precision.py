"""In which precision the optimizer keeps master weights and moments, and how they are packed into bytes.

The arithmetic of an update is always fp32. A layout says what is kept between two updates:

    fp32                    12 bytes per parameter   master and moments in fp32
    bf16_moments             8                       fp32 master, bf16 moments
    residual                10                       the low 16 bits of the master beside the bf16 weight, fp32 moments
    residual_bf16_moments    6                       the same with bf16 moments

The bf16 weight is the master rounded half away from zero. Weight and residual together are the master exactly.

The second moment is rounded to bf16 stochastically. With a beta of 0.999 an update changes it by less than half of a
bf16 step, so rounding to nearest would never change it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from gracetune.config.run_config import StatePrecision

MASTER, RESIDUAL, FIRST, SECOND = "master", "residual", "exp_avg", "exp_avg_sq"
ALIGNMENT: Final = 256
"""Elements. Each field of a packed state begins at a multiple of this, which suits vector loads of every dtype."""
_HALF: Final = 1 << 15
_LOW_BITS: Final = 1 << 16


@dataclass(frozen=True)
class StateLayout:
    """The fields of a state, in the order in which they are packed."""

    fields: Mapping[str, torch.dtype]

    @property
    def bytes_per_element(self) -> int:
        return sum(dtype.itemsize for dtype in self.fields.values())

    @property
    def with_master(self) -> StateLayout:
        """The same moments with an fp32 master, for weights that are not bf16."""
        fields = {MASTER: torch.float32, **self.fields}
        return StateLayout({name: dtype for name, dtype in fields.items() if name != RESIDUAL})

    def size(self, elements: int) -> int:
        """Bytes of the packed state of this many elements."""
        return self.bytes_per_element * padded(elements)

    def views(self, block: Tensor, elements: int) -> dict[str, Tensor]:
        """The fields as views of a block of bytes."""
        found, start = {}, 0
        for name, dtype in self.fields.items():
            found[name] = block[start : start + elements * dtype.itemsize].view(dtype)
            start += padded(elements) * dtype.itemsize
        return found


def padded(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _layout(master: str, master_dtype: torch.dtype, moments: torch.dtype) -> StateLayout:
    return StateLayout({master: master_dtype, FIRST: moments, SECOND: moments})


LAYOUTS: Final[Mapping[StatePrecision, StateLayout]] = MappingProxyType(
    {
        "fp32": _layout(MASTER, torch.float32, torch.float32),
        "bf16_moments": _layout(MASTER, torch.float32, torch.bfloat16),
        "residual": _layout(RESIDUAL, torch.int16, torch.float32),
        "residual_bf16_moments": _layout(RESIDUAL, torch.int16, torch.bfloat16),
    }
)


class Scratch:
    """Memory for unpacked states, which is allocated once and used by one update after another."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self._elements, self._device = elements, device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._elements, dtype=dtype, device=self._device)
        return self._buffers[name][:elements]


def first_state(packed: Mapping[str, Tensor], weights: Sequence[tuple[Tensor, int]]) -> None:
    """The state before the first step: masters equal the weights, everything else is 0."""
    for name, field in packed.items():
        field.zero_()
        if name == MASTER:
            for weight, offset in weights:
                field[offset : offset + weight.numel()].copy_(weight)


def unpack(
    packed: Mapping[str, Tensor], weights: Sequence[tuple[Tensor, int]], scratch: Scratch
) -> tuple[Tensor, Tensor, Tensor]:
    """Master and moments in fp32. Fields that are fp32 are not copied."""
    return _master(packed, weights, scratch), _moment(FIRST, packed, scratch), _moment(SECOND, packed, scratch)


def pack(
    master: Tensor, first: Tensor, second: Tensor, packed: Mapping[str, Tensor],
    weights: Sequence[tuple[Tensor, int]], scratch: Scratch, generator: torch.Generator | None,
) -> None:  # fmt: skip
    """Write weights and state. `generator` decides how second moments are rounded to bf16."""
    if packed[FIRST].dtype != torch.float32:
        packed[FIRST].copy_(first)
        packed[SECOND].copy_(_rounded_stochastically(second, scratch, generator))
    if RESIDUAL in packed:
        _split(master, packed[RESIDUAL], weights, scratch)
    else:
        parts = [master[offset : offset + weight.numel()] for weight, offset in weights]
        torch._foreach_copy_([weight for weight, _ in weights], parts)


def _moment(name: str, packed: Mapping[str, Tensor], scratch: Scratch) -> Tensor:
    held = packed[name]
    return held if held.dtype == torch.float32 else scratch.take(name, held.numel()).copy_(held)


def _master(packed: Mapping[str, Tensor], weights: Sequence[tuple[Tensor, int]], scratch: Scratch) -> Tensor:
    if MASTER in packed:
        return packed[MASTER]
    residual = packed[RESIDUAL]
    bits = scratch.take(MASTER, residual.numel()).view(torch.int32)
    bits.zero_()
    parts = [bits[offset : offset + weight.numel()] for weight, offset in weights]
    torch._foreach_copy_(parts, [weight.view(torch.int16) for weight, _ in weights])
    bits.bitwise_left_shift_(16).add_(residual)
    return bits.view(torch.float32)


def _split(master: Tensor, residual: Tensor, weights: Sequence[tuple[Tensor, int]], scratch: Scratch) -> None:
    """Split masters into bf16 weights and residuals. The integer of a float grows with its magnitude, so adding half a
    step and dropping the low bits rounds half away from zero, and the residual is what that changed."""
    bits = master.view(torch.int32)
    high = scratch.take("rounded", master.numel(), torch.int32)
    torch.add(bits, _HALF, out=high).bitwise_right_shift_(16)
    parts = [high[offset : offset + weight.numel()] for weight, offset in weights]
    torch._foreach_copy_([weight.view(torch.int16) for weight, _ in weights], parts)
    residual.copy_(bits.sub_(high.bitwise_left_shift_(16)))


def _rounded_stochastically(second: Tensor, scratch: Scratch, generator: torch.Generator | None) -> Tensor:
    """Values that bf16 represents exactly: up or down with probabilities that make the mean right. Not negative."""
    noise = scratch.take("noise", second.numel(), torch.int32)
    noise.random_(0, _LOW_BITS, generator=generator)
    bits = second.view(torch.int32)
    bits.add_(noise).bitwise_and_(-_LOW_BITS)
    return bits.view(torch.float32)
