"""Residency hints for tensors: a table of hints by key of a training batch, and hints and prefetch for single tensors.

Each call reports what was applied, or why nothing was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gracetune.hostmem.hint import HINT_PAGE, ByteRange, Hint, not_applied, whole_pages
from gracetune.memory.errors import DriverError, DriverTooOldError
from gracetune.memory.managed import Home, set_home
from gracetune.memory.native import HOST, ManagedSpan, Uvm
from gracetune.units import format_bytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class KeyHint:
    """The hint for a key: the preferred location, and whether to prefetch."""

    home: Home
    prefetch: bool


_LATENTS = KeyHint("host", prefetch=False)
_TEXT = KeyHint("device", prefetch=True)
_SMALL = KeyHint("device", prefetch=True)
_AUDIO = KeyHint("host", prefetch=True)

KEY_HINTS: Final[Mapping[str, KeyHint]] = {
    "latents": _LATENTS,
    "unconditional_latents": _LATENTS,
    "encoder_hidden_states": _TEXT,
    "text_embeddings": _TEXT,
    "pooled_prompt_embeds": _TEXT,
    "prompt_embeds": _TEXT,
    "unconditional_prompt_embeds": _TEXT,
    "add_text_embeds": _TEXT,
    "text_embeds": _TEXT,
    "pooled_embeds": _TEXT,
    "loss_mask": _SMALL,
    "time_ids": _SMALL,
    "seconds": _SMALL,
    "seconds_embeds": _SMALL,
    "image_embeds": _SMALL,
    "audio_latents": _AUDIO,
    "waveform": _AUDIO,
    "audio_samples": _AUDIO,
    "audio_features": _AUDIO,
}
EMBEDS_ATTRIBUTES: Final = ("text_embeds", "pooled_embeds", "attention_mask")
"""Attributes that hold the tensors of prompt embeddings which are objects and not mappings."""


def tensors_with_hints(batch: Any) -> Iterator[tuple[str, Any, KeyHint]]:
    """All tensors of a nested batch whose key or an enclosing key has a hint: (dotted name, tensor, hint)."""
    yield from _walk(batch, "", None, set())


def _walk(value: Any, name: str, key_hint: KeyHint | None, seen: set[int]) -> Iterator[tuple[str, Any, KeyHint]]:
    import torch

    if isinstance(value, torch.Tensor):
        if key_hint is not None and id(value) not in seen:
            seen.add(id(value))
            yield name, value, key_hint
        return
    for key, item in _children(value):
        # The innermost key decides: pooled embeddings inside `latents` are still text.
        yield from _walk(item, f"{name}.{key}".removeprefix("."), hint_of(key) or key_hint, seen)


def hint_of(key: str) -> KeyHint | None:
    """The hint for a key, or None. An attention mask gets that of text, because it is read with its text."""
    if key.startswith("conditioning_latents_"):
        return _LATENTS
    return _TEXT if key.endswith(("attention_mask", "attn_mask")) else KEY_HINTS.get(key)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from ((str(index), item) for index, item in enumerate(value))
    elif value is not None and not isinstance(value, str | bytes | int | float | bool):
        yield from ((name, getattr(value, name)) for name in EMBEDS_ATTRIBUTES if hasattr(value, name))


# -- single tensors ----------------------------------------------------------------------------------------------------


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
    return Hint(applied=True, bytes=pages.bytes, reason=f"prefers the {home}{part}")


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
    return Hint(applied=True, bytes=wanted.bytes, reason=f"moving to the {home}")


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
