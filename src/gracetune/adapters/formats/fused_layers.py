"""Joins the adapters of layers that the original model fuses into one matrix, such as query, key and value, and splits
them again.

The parts are stacked by output rows, and part i has the change `B_i A_i`. One LoRA of rank n r holds all n parts
without loss: the A_i below each other, the B_i along the diagonal, and zeros elsewhere:

    A [n r, in] = [A_1; ...; A_n]        B [out, n r] = diag(B_1, ..., B_n)

A part without an adapter is a block of zeros, and a block of zeros in both matrices is read as no adapter. kohya's
scripts (`split_qkv`) and diffusers use the same form. A LoRA that was trained on the fused matrix has a dense B; each
part then gets all of A and its rows of B. Full differences are simply stacked.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gracetune.adapters.algorithms.assembly import LayerError
from gracetune.adapters.algorithms.low_rank import LowRank
from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.state import Layer
from gracetune.models.keys import MappedLayers


def fuse(layers: Mapping[int, Layer], mapped: MappedLayers) -> Layer:
    """One layer for the fused matrix. `layers` maps positions in `mapped` to layers. Raises `LayerError`."""
    first = next(iter(layers.values()))
    if all(_is_difference(layer) for layer in layers.values()):
        return _stacked(layers, mapped)
    for layer in layers.values():
        if _pair(layer) is None:
            raise LayerError(f"{layer.algorithm} on part of a matrix that holds {_parts(mapped)} in one")
        if (layer.rank, layer.alpha) != (first.rank, first.alpha):
            raise LayerError(f"different ranks or alphas on {_parts(mapped)}, which are one matrix there")
    index, present = next(iter(layers.items()))
    down, up = _matrices(present)
    assert present.rank is not None
    rank, unit = present.rank, up.shape[0] // mapped.shares[index]
    rows = [unit * share for share in mapped.shares]
    joined_down = down.new_zeros(rank * len(rows), *down.shape[1:])
    joined_up = up.new_zeros(sum(rows), rank * len(rows), *up.shape[2:])
    for part, layer in layers.items():
        down, up = _matrices(layer)
        top, left = sum(rows[:part]), rank * part
        if up.shape[0] != rows[part] or down.shape[1:] != joined_down.shape[1:]:
            raise LayerError(
                f"{mapped.paths[part]} is {up.shape[0]}x{down.shape[1]}, which does not fit its neighbours"
            )
        joined_down[left : left + rank] = down
        joined_up[top : top + rows[part], left : left + rank] = up
    tensors = {"lora_A.weight": joined_down, "lora_B.weight": joined_up}
    return Layer("lora", tensors, first.alpha * len(rows), rank * len(rows))


def unfuse(layer: Layer, mapped: MappedLayers) -> dict[str, Layer]:
    """Split a layer of the fused matrix into the layers of `mapped`, by path. Raises `LayerError`."""
    if _is_difference(layer):
        return _unstacked(layer, mapped)
    if _pair(layer) is None:
        raise LayerError(f"{layer.algorithm} over {_parts(mapped)} in one matrix: it cannot be cut into these layers")
    assert layer.rank is not None
    down, up = _matrices(layer)
    unit = _unit(up.shape[0], mapped)
    ups = up.split([unit * share for share in mapped.shares])
    count = len(ups)
    if layer.rank % count or not _along_diagonal(ups, layer.rank // count):
        each = zip(mapped.paths, ups, strict=True)
        return {path: _layer(layer, down.clone(), rows.clone(), layer.alpha) for path, rows in each}
    rank = layer.rank // count
    parts = {}
    for part, (path, rows) in enumerate(zip(mapped.paths, ups, strict=True)):
        block = slice(part * rank, (part + 1) * rank)
        parts[path] = _layer(layer, down[block].clone(), rows[:, block].clone(), layer.alpha / count)
    return _not_empty(parts)


def _stacked(layers: Mapping[int, Layer], mapped: MappedLayers) -> Layer:
    index, present = next(iter(layers.items()))
    names = set(present.tensors)
    if any(set(layer.tensors) != names for layer in layers.values()):
        raise LayerError(f"a bias on some of {_parts(mapped)} only, which are one matrix there")
    unit = present.tensors["diff"].shape[0] // mapped.shares[index]
    tensors = {}
    for name in sorted(names):
        like = present.tensors[name]
        blank = [like.new_zeros(unit * share, *like.shape[1:]) for share in mapped.shares]
        blocks = [layers[part].tensors[name] if part in layers else rows for part, rows in enumerate(blank)]
        if any(block.shape != rows.shape for block, rows in zip(blocks, blank, strict=True)):
            raise LayerError(f"the sizes of {_parts(mapped)} do not fit together")
        tensors[name] = torch.cat(blocks)
    return Layer("full_delta", tensors, 1.0, None)


def _unstacked(layer: Layer, mapped: MappedLayers) -> dict[str, Layer]:
    unit = _unit(layer.tensors["diff"].shape[0], mapped)
    rows = [unit * share for share in mapped.shares]
    if any(tensor.shape[:1] != (sum(rows),) for tensor in layer.tensors.values()):
        raise LayerError(f"a bias of another size than the {sum(rows)} outputs")
    blocks = {name: tensor.split(rows) for name, tensor in layer.tensors.items()}
    return _not_empty(
        {
            path: Layer("full_delta", {name: cut[part].clone() for name, cut in blocks.items()}, 1.0, None)
            for part, path in enumerate(mapped.paths)
        }
    )


def _not_empty(parts: Mapping[str, Layer]) -> dict[str, Layer]:
    """Drop the parts whose tensors are all zero. If all parts are zero, training has not started: keep them all."""
    filled = {path: layer for path, layer in parts.items() if any(tensor.any() for tensor in layer.tensors.values())}
    return filled or dict(parts)


def _unit(outputs: int, mapped: MappedLayers) -> int:
    """The number of output rows for a share of 1."""
    unit, left_over = divmod(outputs, sum(mapped.shares))
    if left_over or not unit:
        raise LayerError(f"{outputs} outputs do not divide among {_parts(mapped)}")
    return unit


def can_be_fused(layer: Layer) -> bool:
    return _is_difference(layer) or _pair(layer) is not None


def _is_difference(layer: Layer) -> bool:
    """Whether all tensors are row tensors, as in a full difference, so that the layer can be stacked by rows."""
    return layer.tensors.keys() <= set(algorithm(layer.algorithm).row_tensors)


def _pair(layer: Layer) -> tuple[str, str] | None:
    """The names of the down and up matrix of a plain LoRA; None for any other layer."""
    record = algorithm(layer.algorithm)
    if isinstance(record, LowRank) and layer.tensors.keys() == {record.down, record.up}:
        return record.down, record.up
    return None


def _matrices(layer: Layer) -> tuple[Tensor, Tensor]:
    names = _pair(layer)
    assert names is not None
    return layer.tensors[names[0]], layer.tensors[names[1]]


def _layer(like: Layer, down: Tensor, up: Tensor, alpha: float) -> Layer:
    names = _pair(like)
    assert names is not None
    return Layer(like.algorithm, dict(zip(names, (down, up), strict=True)), alpha, down.shape[0])


def _along_diagonal(ups: tuple[Tensor, ...], rank: int) -> bool:
    """Whether B is block-diagonal: each part has zeros outside its own `rank` columns."""
    for part, rows in enumerate(ups):
        outside = torch.cat((rows[:, : part * rank], rows[:, (part + 1) * rank :]), dim=1)
        if outside.any():
            return False
    return True


def _parts(mapped: MappedLayers) -> str:
    return ", ".join(path.rpartition(".")[2] for path in mapped.paths)
