"""Checks that the algorithms share when a layer is put together from a file's tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

AlphaRule = Literal["rank", "undefined"]
"""What a file means that gives a layer no alpha: a scale of 1, or nothing anyone could know."""


class LayerError(ValueError):
    """Why these tensors are no layer; the reader adds where."""


class NoScaleError(LayerError):
    """All tensors are there, and nothing says by how much they count."""


@dataclass(frozen=True)
class Convention:
    """What a file says without saying it."""

    without_alpha: AlphaRule = "rank"
    lora_is_locon: bool = False
    """LyCORIS' LoCon and LoRA have the same tensors; only the file's kind or header tells them apart."""
    dora_by_base: bool = False
    """Magnitudes by rows are measured against the base weight: written for ComfyUI, as the header says."""


def scaled(alpha: float | None, rank: int, convention: Convention) -> float:
    if alpha is None:
        if convention.without_alpha == "undefined":
            raise NoScaleError("no alpha, and nothing says how this adapter is scaled")
        return float(rank)
    if not math.isfinite(alpha):
        raise LayerError(f"alpha is {alpha}: half precision ends at 65504")
    return alpha


def check_core(tensors: Mapping[str, Tensor], name: str, rank: int) -> None:
    core = tensors.get(name)
    if core is not None and tuple(core.shape[:2]) != (rank, rank):
        raise LayerError(f"{name} {sides(core)} between matrices of rank {rank}")


def check_matrices(tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
    for name in names:
        if name in tensors and tensors[name].ndim != 2:
            raise LayerError(f"{name} is {sides(tensors[name])}: it is a matrix")


def one_rank(ranks: Mapping[str, int]) -> int:
    if len(set(ranks.values())) > 1:
        raise LayerError("two ranks: " + ", ".join(f"{name} {rank}" for name, rank in ranks.items()))
    return next(iter(ranks.values()))


def sides(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def is_by_input(magnitude: Tensor, outputs: int) -> bool:
    """Whether DoRA's magnitudes belong to columns of the weight, as in files of old LyCORIS, instead of rows."""
    return magnitude.ndim > 1 and magnitude.shape[0] == 1 and outputs > 1
