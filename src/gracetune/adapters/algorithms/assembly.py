"""Checks that the algorithms share when a layer is put together from a file's tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gracetune.errors import short

if TYPE_CHECKING:
    from torch import Tensor

_FP32_MAX = (2 - 2**-23) * 2.0**127
MOST_ELEMENTS = 1 << 32
"""Of a weight. The largest of the published denoisers have a fiftieth of it."""
AlphaRule = Literal["rank", "undefined"]
"""What a file means that gives a layer no alpha: a scale of 1, or nothing anyone could know."""


class LayerError(ValueError):
    """Why these tensors are no layer; the reader adds where."""


class NoScaleError(LayerError):
    """All tensors are there, and nothing says by how much they count."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


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
            raise NoScaleError("no alpha, and nothing says how this adapter is scaled", rank)
        return float(rank)
    return checked_alpha(alpha)


def checked_alpha(value: object, location: str = "") -> float:
    """A number that fp32 can hold. `location` follows the word in messages."""
    subject = f"alpha{location} is"
    if isinstance(value, bool):
        raise LayerError(f"{subject} {str(value).lower()}: it is a number")
    if isinstance(value, str):
        raise LayerError(f'{subject} the text "{short(value, 20)}": it is a number, without quotes')
    if not isinstance(value, int | float):
        raise LayerError(f"{subject} {short(repr(value), 20)}: it is a number")
    if isinstance(value, float) and math.isnan(value):
        raise LayerError(f"{subject} NaN")
    if value in (math.inf, -math.inf):
        raise LayerError(f"{subject} infinite: half precision ends at 65504")
    if abs(value) > _FP32_MAX:
        raise LayerError(f"{subject} above {_FP32_MAX:.2g}, where fp32 ends")
    return float(value)


def check_core(tensors: Mapping[str, Tensor], name: str, rank: int) -> None:
    core = tensors.get(name)
    if core is not None and tuple(core.shape[:2]) != (rank, rank):
        raise LayerError(f"{name} {sides(core)} between matrices of rank {rank}")


def check_matrices(tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
    for name in names:
        if name in tensors and tensors[name].ndim != 2:
            raise LayerError(f"{name} is {sides(tensors[name])}: it is a matrix")


def check_vector(name: str, tensor: Tensor) -> None:
    """A number for each channel; of convolutions with sides of one around it."""
    if tensor.numel() != max(tensor.shape, default=1):
        raise LayerError(f"{name} is {sides(tensor)}: it is a number for each channel")


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
