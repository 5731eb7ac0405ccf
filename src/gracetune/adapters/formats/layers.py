"""One layer's tensors made into a `Layer`, or refused: nothing missing, one rank, a scale that is defined."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gracetune.adapters.state import AdapterState, Algorithm, Layer

AlphaRule = Literal["rank", "undefined"]
"""What a file means that gives a layer no alpha: a scale of 1, or nothing anyone could know."""

_LORA = {"lora_A.weight", "lora_B.weight"}
_LOHA = {f"hada_w{number}_{side}" for number in "12" for side in "ab"}
_KINDS: tuple[tuple[Algorithm, frozenset[str], frozenset[str]], ...] = (
    ("lora", frozenset(_LORA), frozenset({"lora_mid.weight", "dora_scale"})),
    ("loha", frozenset(_LOHA), frozenset({"hada_t1", "hada_t2", "dora_scale"})),
    ("diag_oft", frozenset({"oft_blocks"}), frozenset({"rescale"})),
    ("ia3", frozenset({"weight", "on_input"}), frozenset()),
    ("full_delta", frozenset({"diff"}), frozenset({"diff_b"})),
)  # fmt: skip
LOCON_NAMES = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight"}


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


def assemble(tensors: Mapping[str, Tensor], alpha: float | None, convention: Convention) -> Layer:
    """A layer from its tensors, by LoRA's names of them. Raises `LayerError`."""
    algorithm = _algorithm(tensors)
    _check_numbers(tensors)
    _check_dimensions(tensors)
    if algorithm == "lokr":
        return _lokr(tensors, alpha, convention)
    if algorithm == "lora":
        return _lora(tensors, alpha, convention)
    if algorithm == "loha":
        return _loha(tensors, alpha, convention)
    if algorithm == "diag_oft":
        return _oft(tensors, alpha)
    return Layer(algorithm, dict(tensors), 1.0, None)


def _algorithm(tensors: Mapping[str, Tensor]) -> Algorithm:
    """`lora` stands for all that consist of a down and an up matrix."""
    names = set(tensors)
    if not names:
        raise LayerError("an alpha and nothing to scale")
    if any(name.startswith("lokr_") for name in names):
        unknown = {name for name in names if not name.startswith("lokr_") and name != "dora_scale"}
        if unknown:
            raise LayerError(f"LoKr together with {_listed(unknown)}")
        return "lokr"
    if names == {"weight"}:
        raise LayerError("a plain weight: no tensor of an adapter")
    for algorithm, needed, optional in _KINDS:
        if names & needed and names <= needed | optional:
            if not needed <= names:
                raise LayerError(f"{_listed(names)} without {_listed(needed - names)}")
            return algorithm
    if names == {"dora_scale"}:
        raise LayerError("dora_scale without lora_A.weight, lora_B.weight")
    if names == {"diff_b"}:
        raise LayerError("diff_b without diff")
    raise LayerError(f"tensors of more than one kind of adapter: {_listed(names)}")


def _check_numbers(tensors: Mapping[str, Tensor]) -> None:
    """Whole numbers are a quantised file's, and nothing here says what they have to be multiplied by."""
    for name, tensor in tensors.items():
        if name != "on_input" and not tensor.is_floating_point():
            raise LayerError(f"{name} holds {tensor.dtype}: the weights of an adapter are bf16, fp16 or fp32")


def _check_dimensions(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        least = 2 if name.startswith(("lora_", "lokr_", "hada_")) else 1 if name in ("diff", "weight") else 0
        if tensor.ndim < least or tensor.numel() == 0:
            raise LayerError(f"{name} is {_shape(tensor)}: not the shape of such a tensor")
    if "on_input" in tensors and tensors["on_input"].numel() != 1:
        raise LayerError(f"on_input is {_shape(tensors['on_input'])}: it is one number, 0 or 1")


def _lora(tensors: Mapping[str, Tensor], alpha: float | None, convention: Convention) -> Layer:
    """LoRA, DoRA or LoCon: by what else is there, and by the file's convention."""
    down, up = tensors["lora_A.weight"], tensors["lora_B.weight"]
    if down.shape[0] != up.shape[1]:
        ranks = f"rank {down.shape[0]} ({_shape(down)}), lora_B.weight {up.shape[1]} ({_shape(up)})"
        raise LayerError(f"lora_A.weight has {ranks}")
    rank = down.shape[0]
    middle = tensors.get("lora_mid.weight")
    kernels = [("lora_B.weight", up), *([("lora_A.weight", down)] if middle is not None else [])]
    for name, tensor in kernels:
        if any(side != 1 for side in tensor.shape[2:]):
            raise LayerError(f"{name} is {_shape(tensor)}: its kernel has one point")
    _check_core(tensors, "lora_mid.weight", rank)
    scale = tensors.get("dora_scale")
    inputs = down.shape[1]
    by_input = scale is not None and is_by_input(scale, up.shape[0]) and scale.numel() == inputs
    if scale is not None and not by_input and scale.numel() != up.shape[0]:
        raise LayerError(f"dora_scale {_shape(scale)} for {up.shape[0]} outputs and {inputs} inputs")
    alpha = _scaled(alpha, rank, convention)
    if middle is not None or convention.lora_is_locon or by_input:
        return Layer("locon", {LOCON_NAMES.get(name, name): tensor for name, tensor in tensors.items()}, alpha, rank)
    if scale is None:
        return Layer("lora", dict(tensors), alpha, rank)
    return Layer("dora", dict(tensors) | {"dora_scale": scale.reshape(-1)}, alpha, rank)


def _loha(tensors: Mapping[str, Tensor], alpha: float | None, convention: Convention) -> Layer:
    for name in sorted(_LOHA):
        if tensors[name].ndim != 2:
            raise LayerError(f"{name} is {_shape(tensors[name])}: it is a matrix")
    rank = _common_rank({name: tensors[name].shape[0] for name in ("hada_w1_b", "hada_w2_b")})
    cores = {"hada_t1", "hada_t2"} & tensors.keys()
    if len(cores) == 1:
        raise LayerError("only one of hada_t1 and hada_t2")
    for first, second in (("hada_w1_a", "hada_w2_a"), ("hada_w1_b", "hada_w2_b"), ("hada_t1", "hada_t2")):
        if first in tensors and tensors[first].shape != tensors[second].shape:
            raise LayerError(f"{first} is {_shape(tensors[first])}, {second} {_shape(tensors[second])}")
    for name in ("hada_w1_a", "hada_w2_a"):
        inner = tensors[name].shape[0 if cores else 1]
        if inner != rank:
            raise LayerError(f"{name} has rank {inner}, hada_w1_b {rank}")
    _check_core(tensors, "hada_t1", rank)
    return Layer("loha", dict(tensors), _scaled(alpha, rank, convention), rank)


def _lokr(tensors: Mapping[str, Tensor], alpha: float | None, convention: Convention) -> Layer:
    ranks: dict[str, int] = {}
    for name in ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b"):
        if name in tensors and tensors[name].ndim != 2:
            raise LayerError(f"{name} is {_shape(tensors[name])}: it is a matrix")
    for factor in ("lokr_w1", "lokr_w2"):
        pieces = {f"{factor}_a", f"{factor}_b"} & tensors.keys()
        if factor in tensors and pieces:
            raise LayerError(f"{factor} both whole and in pieces")
        if factor not in tensors and len(pieces) < 2:
            raise LayerError(f"neither {factor} nor both {factor}_a and {factor}_b")
        if pieces:
            inner = tensors[f"{factor}_b"].shape[0]
            outer = tensors[f"{factor}_a"].shape[0 if factor == "lokr_w2" and "lokr_t2" in tensors else 1]
            if inner != outer:
                raise LayerError(f"{factor}_a has rank {outer}, {factor}_b {inner}")
            ranks[factor] = inner
    if "lokr_t2" in tensors and "lokr_w2" not in ranks:
        raise LayerError("lokr_t2 without lokr_w2_a and lokr_w2_b")
    if not ranks:
        # Nothing is decomposed, so alpha scales nothing. ai-toolkit writes 9999999999 here, which fp16 makes inf.
        return Layer("lokr", dict(tensors), 1.0, None)
    rank = _common_rank(ranks)
    _check_core(tensors, "lokr_t2", rank)
    return Layer("lokr", dict(tensors), _scaled(alpha, rank, convention), rank)


def _oft(tensors: Mapping[str, Tensor], alpha: float | None) -> Layer:
    blocks = tensors["oft_blocks"]
    if blocks.ndim != 3 or blocks.shape[1] != blocks.shape[2]:
        raise LayerError(f"oft_blocks {_shape(blocks)}: Diag-OFT has square blocks [blocks, size, size]")
    rescale, rows = tensors.get("rescale"), blocks.shape[0] * blocks.shape[1]
    if rescale is not None and rescale.numel() != rows:
        raise LayerError(f"rescale {_shape(rescale)} for {rows} outputs")
    if alpha:  # LyCORIS keeps the constraint under this name; our state has no place for one
        raise LayerError(f"an OFT constraint of {alpha:g}; only OFT without a constraint can be read")
    return Layer("diag_oft", dict(tensors), 1.0, None)


def _scaled(alpha: float | None, rank: int, convention: Convention) -> float:
    if alpha is None:
        if convention.without_alpha == "undefined":
            raise NoScaleError("no alpha, and nothing says how this adapter is scaled")
        return float(rank)
    if not math.isfinite(alpha):
        raise LayerError(f"alpha is {alpha}: half precision ends at 65504")
    return alpha


def _check_core(tensors: Mapping[str, Tensor], name: str, rank: int) -> None:
    core = tensors.get(name)
    if core is not None and tuple(core.shape[:2]) != (rank, rank):
        raise LayerError(f"{name} {_shape(core)} between matrices of rank {rank}")


def _common_rank(ranks: Mapping[str, int]) -> int:
    if len(set(ranks.values())) > 1:
        raise LayerError("two ranks: " + ", ".join(f"{name} {rank}" for name, rank in ranks.items()))
    return next(iter(ranks.values()))


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def is_by_input(magnitude: Tensor, outputs: int) -> bool:
    """Whether DoRA's magnitudes belong to columns of the weight, as in files of old LyCORIS, instead of rows."""
    return magnitude.ndim > 1 and magnitude.shape[0] == 1 and outputs > 1


# -- what a state is, in a word ---------------------------------------------------------------------------------------


def algorithms(state: AdapterState) -> tuple[Algorithm, ...]:
    """The kinds of layers in a state, the most frequent first."""
    return tuple(kind for kind, _ in Counter(layer.algorithm for layer in state.layers.values()).most_common())


def common_rank(state: AdapterState) -> int | None:
    ranks = Counter(layer.rank for layer in state.layers.values() if layer.rank is not None)
    return ranks.most_common(1)[0][0] if ranks else None


def common_alpha(state: AdapterState) -> float | None:
    alphas = Counter(layer.alpha for layer in state.layers.values() if layer.rank is not None)
    return alphas.most_common(1)[0][0] if alphas else None
