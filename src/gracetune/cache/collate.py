"""Collation: combine the entries of several samples into the tensors of a batch.

The functions are pure. They copy no data; each result is a `Stacked`, which describes what to copy.

Samples of one bucket have latents of one shape, so most tensors are simply stacked. There are two exceptions:

- Captions have different lengths. Shorter embeddings are padded with zeros, and `prompt_attention_mask` marks caption
  (True) and padding (False). If lengths differ and the encoder made no mask, the mask is created here.
- If only some samples have a `loss_mask`, the others get a mask of ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from gracetune.cache.errors import CacheError
from gracetune.errors import Problem
from gracetune.memory.stacked import Constant, Stacked

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EMBEDS: Final = "prompt_embeds"
MASK: Final = "prompt_attention_mask"
LOSS_MASK: Final = "loss_mask"
OPTIONAL: Final = (LOSS_MASK, MASK)
"""Filled with ones for samples that lack it, if other samples of the batch have it."""


class UnlikeEntriesError(CacheError):
    """These entries do not fit in one batch. Bucketing should have separated them."""


def collate(entries: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> dict[str, Stacked]:
    """The tensors of a batch; their first dimension is `len(entries)`. `names`: the samples, for error messages."""
    if not entries or len(entries) != len(names):
        raise ValueError(f"{len(entries)} entries and {len(names)} names")
    lengths = _caption_lengths(entries, names)
    found = dict.fromkeys(name for entry in entries for name in entry)
    batch = {}
    for name in found:
        if name == EMBEDS:
            batch[name] = _padded(name, [entry[name] for entry in entries], names)
        elif name == MASK:
            batch[name] = _caption_mask([entry.get(name) for entry in entries], lengths, names)
        else:
            batch[name] = _alike(name, [entry.get(name) for entry in entries], names)
    if MASK not in batch and len(set(lengths)) > 1:
        batch[MASK] = _caption_mask([None] * len(entries), lengths, names)
    return batch


def _caption_lengths(entries: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> list[int]:
    """Length of each sample's embedding in tokens, or an empty list if the batch has no text."""
    with_text = [EMBEDS in entry for entry in entries]
    if not any(with_text):
        return []
    if not all(with_text):
        raise _unlike(EMBEDS, f"none for {names[with_text.index(False)]}", "one for every sample")
    return [entry[EMBEDS].shape[0] for entry in entries]


def _padded(name: str, tensors: Sequence[Tensor], names: Sequence[str]) -> Stacked:
    """Stack tensors [T, D] of different lengths T to [B, max T, D]."""
    _check_dtypes(name, tensors, names)
    rest = tensors[0].shape[1:]
    for tensor, sample in zip(tensors, names, strict=True):
        if tensor.shape[1:] != rest:
            found = f"shape {_shape(tensor)} for {sample}, {_shape(tensors[0])} for {names[0]}"
            raise _unlike(name, found, "the same width for all")
    longest = max(tensor.shape[0] for tensor in tensors)
    return Stacked((len(tensors), longest, *rest), tensors[0].dtype, tuple(tensors))


def _caption_mask(masks: Sequence[Tensor | None], lengths: Sequence[int], names: Sequence[str]) -> Stacked:
    import torch

    given = [mask for mask in masks if mask is not None]
    for mask, length, sample in zip(masks, lengths, names, strict=bool(lengths)):
        if mask is not None and tuple(mask.shape) != (length,):
            raise _unlike(MASK, f"shape {_shape(mask)} for {sample}", f"[{length}], the length of its {EMBEDS}")
    if not lengths:
        raise _unlike(MASK, f"one for {names[0]}, which has no {EMBEDS}", "both or neither")
    _check_dtypes(MASK, given, names)
    filled = tuple(
        Constant((length,), 1.0) if mask is None else mask for mask, length in zip(masks, lengths, strict=True)
    )
    return Stacked((len(filled), max(lengths)), given[0].dtype if given else torch.bool, filled)


def _alike(name: str, tensors: Sequence[Tensor | None], names: Sequence[str]) -> Stacked:
    """Stack tensors of one shape. An optional tensor is replaced by ones where it is absent."""
    given = [(tensor, sample) for tensor, sample in zip(tensors, names, strict=True) if tensor is not None]
    first, first_name = given[0]
    shape = first.shape
    if len(given) < len(tensors) and name not in OPTIONAL:
        without = next(sample for tensor, sample in zip(tensors, names, strict=True) if tensor is None)
        raise _unlike(name, f"one for {first_name}, none for {without}", "one for every sample, or for none")
    for tensor, sample in given:
        if tensor.shape != shape:
            found = f"shape {_shape(tensor)} for {sample}, {_shape(first)} for {first_name}"
            raise _unlike(name, found, "the same shape for all")
    _check_dtypes(name, [tensor for tensor, _ in given], [sample for _, sample in given])
    filled = tuple([Constant(tuple(shape), 1.0) if tensor is None else tensor for tensor in tensors])
    return Stacked((len(tensors), *shape), first.dtype, filled)


def _check_dtypes(name: str, tensors: Sequence[Tensor], names: Sequence[str]) -> None:
    if len({tensor.dtype for tensor in tensors}) <= 1:
        return
    dtypes: dict[torch.dtype, str] = {}
    for tensor, sample in zip(tensors, names, strict=False):
        dtypes.setdefault(tensor.dtype, sample)
    found = ", ".join(f"{str(dtype).removeprefix('torch.')} for {sample}" for dtype, sample in dtypes.items())
    raise _unlike(name, found, "the same dtype for all")


def _shape(tensor: Tensor) -> str:
    return str([*tensor.shape])


def _unlike(name: str, found: str, expected: str) -> UnlikeEntriesError:
    hint = "run `gracetune cache audit CONFIG`; if it reports nothing, please report this bug"
    return UnlikeEntriesError(Problem(f"{name} of a batch", found, expected, hint))
