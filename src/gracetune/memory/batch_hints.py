"""Residency hints for the tensors of a training batch: a table by key, and the search for tensors in a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gracetune.memory.managed import Home


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
