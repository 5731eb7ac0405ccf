"""Residency hints and prefetch for single tensors. Each call reports what was applied, or why nothing was."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gracetune.hostmem.hint import HINT_PAGE, ByteRange, Hint, not_applied, whole_pages
from gracetune.memory.errors import DriverError, DriverTooOldError
from gracetune.memory.managed import Home, set_home
from gracetune.memory.native import HOST, ManagedSpan, Uvm
from gracetune.units import format_bytes

if TYPE_CHECKING:
    import torch


def prefer(uvm: Uvm, tensor: torch.Tensor, home: Home) -> Hint:
    """Set the preferred location of a managed tensor's pages."""
    device = _device(tensor)
    try:
        wanted = _managed_range(uvm, tensor)
        if isinstance(wanted, Hint):
            return wanted
        pages = whole_pages(wanted, _allocation(uvm, wanted, device))
        if pages is None:
            return not_applied(f"shares its page of {format_bytes(HINT_PAGE)} with other memory: hint the whole buffer")
        set_home(uvm, ManagedSpan(pages.start, pages.bytes, device), home)
    except (DriverError, DriverTooOldError) as error:
        return _rejected(error)
    shared = wanted.bytes - pages.bytes
    part = f" ({format_bytes(shared)} share pages with others)" if shared > 0 else ""
    return Hint(True, pages.bytes, f"prefers the {home}{part}")


def prefetch(
    uvm: Uvm, tensor: torch.Tensor, home: Home, stream_of: Callable[[int], int], device: int | None = None
) -> Hint:
    """Enqueue the migration of a managed tensor on a CUDA stream. Other data on the same pages migrates too."""
    device = _device(tensor) if device is None else device
    try:
        wanted = _managed_range(uvm, tensor)
        if isinstance(wanted, Hint):
            return wanted
        span = ManagedSpan(wanted.start, wanted.bytes, device)
        uvm.prefetch(span, HOST if home == "host" else device, stream_of(device))
    except (DriverError, DriverTooOldError) as error:
        return _rejected(error)
    return Hint(True, wanted.bytes, f"moving to the {home}")


def _rejected(error: DriverError | DriverTooOldError) -> Hint:
    return not_applied(f"the driver rejected it: {str(error).splitlines()[0]}")


def _managed_range(uvm: Uvm, tensor: torch.Tensor) -> ByteRange | Hint:
    import torch

    if tensor.device.type not in ("cuda", "cpu"):
        return not_applied(f"a {tensor.device.type} tensor has no CUDA memory")
    if tensor.is_nested or tensor.layout != torch.strided:
        return not_applied("a nested or sparse tensor is several pieces of memory: hint those")
    if tensor.numel() == 0:
        return not_applied("an empty tensor has no bytes")
    if not is_dense(tensor.shape, tensor.stride()):
        return not_applied("not contiguous: other elements lie between its own; hint the tensor it is a view of")
    if not uvm.is_managed(tensor.data_ptr(), _device(tensor)):
        return not_applied(_why_not_managed(tensor))
    return ByteRange(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _why_not_managed(tensor: torch.Tensor) -> str:
    if tensor.device.type == "cpu":
        return (
            "pinned host memory stays where it is"
            if tensor.is_pinned()
            else "a CPU tensor: it is in host memory already"
        )
    return "plain device memory cannot move: allocate it with managed_empty"


def _allocation(uvm: Uvm, wanted: ByteRange, device: int) -> ByteRange:
    span = uvm.allocation_of(wanted.start, device)
    return ByteRange(span.pointer, span.bytes)


def _device(tensor: torch.Tensor) -> int:
    return tensor.device.index or 0


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their byte range without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for step, length in sorted((step, length) for length, step in zip(shape, stride, strict=True) if length > 1):
        if step != expected:
            return False
        expected *= length
    return True
