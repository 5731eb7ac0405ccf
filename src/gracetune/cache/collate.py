"""The entries of a batch's samples become the tensors of the batch. Pure: nothing is copied here, only described.

Samples of one bucket have latents of one shape, so nearly everything is stacked as it is. What differs by nature:

- captions have lengths of their own: shorter embeddings are followed by zeros, and `prompt_attention_mask` says what is
  caption (True) and what is filling (False). It is made where lengths differ and the encoder made none.
- a sample without a `loss_mask` among masked ones counts everywhere: ones.
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
"""Ones where a sample has none and others do."""


class UnlikeEntriesError(CacheError):
    """Entries that cannot share a batch: buckets should have kept them apart."""


def collate(entries: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> dict[str, Stacked]:
    """The tensors of a batch with a first dimension of `len(entries)`. `names` of the samples, for errors."""
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
    """Of each sample's embeddings; none where the batch has no text."""
    with_text = [EMBEDS in entry for entry in entries]
    if not any(with_text):
        return []
    if not all(with_text):
        raise _unlike(EMBEDS, f"none for {names[with_text.index(False)]}", "one for every sample")
    return [entry[EMBEDS].shape[0] for entry in entries]


def _padded(name: str, pieces: Sequence[Tensor], names: Sequence[str]) -> Stacked:
    _check_dtypes(name, pieces, names)
    rest = pieces[0].shape[1:]
    for piece, sample in zip(pieces, names, strict=True):
        if piece.shape[1:] != rest:
            raise _unlike(name, f"{_sides(piece)} for {sample}, {_sides(pieces[0])} for {names[0]}", "one width")
    longest = max(piece.shape[0] for piece in pieces)
    return Stacked((len(pieces), longest, *rest), pieces[0].dtype, tuple(pieces))


def _caption_mask(masks: Sequence[Tensor | None], lengths: Sequence[int], names: Sequence[str]) -> Stacked:
    import torch

    given = [mask for mask in masks if mask is not None]
    for mask, length, sample in zip(masks, lengths, names, strict=bool(lengths)):
        if mask is not None and tuple(mask.shape) != (length,):
            raise _unlike(MASK, f"{_sides(mask)} for {sample}", f"[{length}], as its {EMBEDS} have")
    if not lengths:
        raise _unlike(MASK, f"one for {names[0]}, which has no {EMBEDS}", "both or neither")
    _check_dtypes(MASK, given, names)
    pieces = tuple(
        Constant((length,), 1.0) if mask is None else mask for mask, length in zip(masks, lengths, strict=True)
    )
    return Stacked((len(pieces), max(lengths)), given[0].dtype if given else torch.bool, pieces)


def _alike(name: str, pieces: Sequence[Tensor | None], names: Sequence[str]) -> Stacked:
    given = [(piece, sample) for piece, sample in zip(pieces, names, strict=True) if piece is not None]
    first, first_name = given[0]
    shape = first.shape
    if len(given) < len(pieces) and name not in OPTIONAL:
        without = next(sample for piece, sample in zip(pieces, names, strict=True) if piece is None)
        raise _unlike(name, f"one for {first_name}, none for {without}", "one for every sample, or for none")
    for piece, sample in given:
        if piece.shape != shape:
            raise _unlike(name, f"{_sides(piece)} for {sample}, {_sides(first)} for {first_name}", "one shape")
    _check_dtypes(name, [piece for piece, _ in given], [sample for _, sample in given])
    filled = tuple([Constant(tuple(shape), 1.0) if piece is None else piece for piece in pieces])
    return Stacked((len(pieces), *shape), first.dtype, filled)


def _check_dtypes(name: str, pieces: Sequence[Tensor], names: Sequence[str]) -> None:
    if len({piece.dtype for piece in pieces}) <= 1:
        return
    dtypes: dict[torch.dtype, str] = {}
    for piece, sample in zip(pieces, names, strict=False):
        dtypes.setdefault(piece.dtype, sample)
    told = ", ".join(f"{str(dtype).removeprefix('torch.')} for {sample}" for dtype, sample in dtypes.items())
    raise _unlike(name, told, "one dtype")


def _sides(tensor: Tensor) -> str:
    return str([*tensor.shape])


def _unlike(name: str, found: str, expected: str) -> UnlikeEntriesError:
    hint = "gracetune cache audit CONFIG; if it finds nothing, please report it: such samples must not share a batch"
    return UnlikeEntriesError(Problem(f"{name} of a batch", found, expected, hint))
