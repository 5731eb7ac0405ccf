"""Checks that the algorithms share when they assemble a layer from a file's tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from gracetune.errors import short

if TYPE_CHECKING:
    from torch import Tensor

_FP32_MAX = (2 - 2**-23) * 2.0**127
MOST_ELEMENTS = 1 << 32
"""The most elements of a weight. The largest weights of published denoisers have a fiftieth of this."""
AlphaRule = Literal["rank", "undefined"]
"""The meaning of a missing alpha: alpha = rank, that is a scale of 1, or an unknown scale."""


class LayerError(ValueError):
    """The reason why tensors do not form a layer. The reader of the file adds the layer's name."""


class NoScaleError(LayerError):
    """The tensors are complete, but the scale is unknown."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class Convention:
    """What a file format implies without writing it into the file."""

    without_alpha: AlphaRule = "rank"
    lora_is_locon: bool = False
    """LyCORIS' LoCon and LoRA have the same tensors; they differ only in the file's kind or header."""
    dora_is_locon: bool = False
    """The same for layers with a `dora_scale`."""
    dora_by_base: bool = False
    """Row magnitudes refer to the norms of the base weight. The header marks such files, which are for ComfyUI."""

    def with_header(self, kinds: Collection[str]) -> Convention:
        """The convention of a file whose header lists these algorithms. Only our own files have such a header."""
        if "locon" in kinds and "lora" not in kinds:
            return replace(self, lora_is_locon=True, dora_is_locon="dora" not in kinds)
        if "lora" in kinds or "dora" in kinds:
            return replace(self, lora_is_locon=False, dora_is_locon=False)
        return self

    def kind_of(self, found: str) -> str:
        """The algorithm of a layer, given the one that its tensors' names stand for."""
        is_locon = (found == "lora" and self.lora_is_locon) or (found == "dora" and self.dora_is_locon)
        return "locon" if is_locon else found


def defined_alpha(alpha: float | None, rank: int, convention: Convention) -> float:
    """The alpha of a layer, from the file or by the convention. Raises `NoScaleError` if neither defines it."""
    if alpha is None:
        if convention.without_alpha == "undefined":
            raise NoScaleError("no alpha, and no other information about the scale of this adapter", rank)
        return float(rank)
    return checked_alpha(alpha)


def checked_alpha(value: object, location: str = "") -> float:
    """A number that fp32 can hold. Messages put `location` after the word alpha."""
    subject = f"alpha{location} is"
    if isinstance(value, bool):
        raise LayerError(f"{subject} {str(value).lower()}: expected a number")
    if isinstance(value, str):
        raise LayerError(f'{subject} the text "{short(value, 20)}": expected a number, without quotes')
    if not isinstance(value, int | float):
        raise LayerError(f"{subject} {short(repr(value), 20)}: expected a number")
    if isinstance(value, float) and math.isnan(value):
        raise LayerError(f"{subject} NaN")
    if value in (math.inf, -math.inf):
        raise LayerError(f"{subject} infinite: half precision ends at 65504")
    if abs(value) > _FP32_MAX:
        raise LayerError(f"{subject} above {_FP32_MAX:.2g}, where fp32 ends")
    return float(value)


def check_core(tensors: Mapping[str, Tensor], name: str, rank: int) -> None:
    """A Tucker core has the shape [r, r, *kernel]."""
    core = tensors.get(name)
    if core is not None and tuple(core.shape[:2]) != (rank, rank):
        raise LayerError(f"{name} {sides(core)} between matrices of rank {rank}")


def check_matrices(tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
    for name in names:
        if name in tensors and tensors[name].ndim != 2:
            raise LayerError(f"{name} is {sides(tensors[name])}: expected a matrix")


def check_vector(name: str, tensor: Tensor) -> None:
    """A vector with one number for each channel. For convolutions it may have further dimensions of size 1."""
    if tensor.numel() != max(tensor.shape, default=1):
        raise LayerError(f"{name} is {sides(tensor)}: expected one number for each channel")


def one_rank(ranks: Mapping[str, int]) -> int:
    if len(set(ranks.values())) > 1:
        raise LayerError("two ranks: " + ", ".join(f"{name} {rank}" for name, rank in ranks.items()))
    return next(iter(ranks.values()))


def sides(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def is_by_input(magnitude: Tensor, outputs: int) -> bool:
    """Whether DoRA's magnitudes belong to columns of the weight, as in files of older LyCORIS, instead of rows."""
    return magnitude.ndim > 1 and magnitude.shape[0] == 1 and outputs > 1
