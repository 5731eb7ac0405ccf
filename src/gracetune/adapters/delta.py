"""What an adapter's layer adds to a weight, in fp32. The one place where the algorithms' formulas are written down.

    lora, locon   s B A, with a core between them for convolutions in Tucker form
    lokr          s W1 (x) W2, each whole or a product, the second also in Tucker form
    loha          s (W1a W1b) * (W2a W2b), each factor also in Tucker form
    full_delta    the difference itself
    ia3           W * w, along the output or the input
    diag_oft      (R - 1) W by blocks of rows, R = (1 + Q) (1 - Q)^-1, Q = blocks - blocks^T
    dora_scale    m (W + D) / |W + D| - W, by rows (by columns in files of older LyCORIS), where D is one of the above
    dora_base_scale    m (W + D) / |W| - W, by rows: what ComfyUI makes of a dora_scale by rows

The reference of training uses the same functions (`change`), and tests hold the factorised forms (`fast.products`) to
it, so what is trained, merged and converted is one thing. Our own and not the library's: LyCORIS 4.1 multiplies LoKr's
and LoHa's merged weights by the scale twice, rounds its forward's delta to the precision of a 16-bit base weight, and
rotates or scales the bias in some paths and not in others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gracetune.adapters.state import Algorithm, Layer

Tensors = Mapping[str, Tensor]
FLAG = "on_input"
MAGNITUDE, BASE_MAGNITUDE = "dora_scale", "dora_base_scale"
EPSILON = torch.finfo(torch.float32).eps
ZERO_AT_FIRST = frozenset(
    {
        "lora_B.weight", "lora_up.weight", "lokr_w2", "lokr_w2_b", "hada_w2_a", "weight", "oft_blocks", "diff", "diff_b"
    }
)  # fmt: skip
"""Tensors that training begins with at 0. While all of them in a layer are 0, the layer changes nothing and its other
tensors get no gradient; the change grows from 0 with them."""


def delta(layer: Layer, weight_shape: Sequence[int]) -> Tensor:
    """The layer's change of a weight of this shape, where it does not depend on the weight itself."""
    if needs_weight(layer):
        raise ValueError(f"what {_described(layer)} changes depends on the weight it sits on: use `apply`")
    return change(layer.algorithm, _fp32(layer), layer.scale, torch.Size(weight_shape))


def apply(layer: Layer, weight: Tensor, *, strength: float = 1.0) -> Tensor:
    """The weight with the layer in it, in fp32. `strength` goes from the base weight (0) to the adapted one (1)."""
    base = weight.detach().float()
    # `on_input` is a flag, asked for here: on a GPU that would wait for the GPU.
    tensors = {name: tensor if name == FLAG else tensor.to(base.device) for name, tensor in _fp32(layer).items()}
    return base + strength * change(layer.algorithm, tensors, layer.scale, base.shape, base)


def bias_delta(layer: Layer) -> Tensor | None:
    """Only `full_delta` changes a bias."""
    found = layer.tensors.get("diff_b") if layer.algorithm == "full_delta" else None
    return None if found is None else found.detach().float()


def needs_weight(layer: Layer) -> bool:
    return layer.algorithm in ("ia3", "diag_oft") or not {MAGNITUDE, BASE_MAGNITUDE}.isdisjoint(layer.tensors)


def measured_by_base(layer: Layer, weight: Tensor) -> Layer:
    """The same DoRA with its magnitudes by rows in ComfyUI's terms: there they are divided by the base weight's norms.

    Other layers come out as they are, those with magnitudes by columns too: ComfyUI divides them by the right norms.
    """
    magnitude = layer.tensors.get(MAGNITUDE)
    if magnitude is None or (layer.algorithm != "dora" and _by_columns(magnitude, weight.shape)):
        return layer
    base = weight.detach().float()
    tensors = {name: tensor.to(base.device) for name, tensor in _fp32(layer).items() if name != MAGNITUDE}
    added = change("lora" if layer.algorithm == "dora" else layer.algorithm, tensors, layer.scale, base.shape)
    ratio = (_row_norms(base) + EPSILON) / (_row_norms(base + added) + EPSILON)
    others = {name: tensor for name, tensor in layer.tensors.items() if name != MAGNITUDE}
    scaled = _rows(magnitude.detach().float().flatten() * ratio.cpu(), base.shape)
    return Layer(layer.algorithm, {**others, BASE_MAGNITUDE: scaled}, layer.alpha, layer.rank)


def measured_by_adapted(layer: Layer, weight: Tensor) -> Layer:
    """The inverse of `measured_by_base`: a DoRA written for ComfyUI with its magnitudes as they are trained."""
    magnitude = layer.tensors.get(BASE_MAGNITUDE)
    if magnitude is None:
        return layer
    base = weight.detach().float()
    others = {name: tensor for name, tensor in layer.tensors.items() if name != BASE_MAGNITUDE}
    factors = {name: tensor.to(base.device) for name, tensor in _fp32(layer).items() if name != BASE_MAGNITUDE}
    added = change("lora" if layer.algorithm == "dora" else layer.algorithm, factors, layer.scale, base.shape)
    ratio = (_row_norms(base + added) + EPSILON) / (_row_norms(base) + EPSILON)
    scaled = magnitude.detach().float().flatten() * ratio.cpu()
    return Layer(layer.algorithm, {**others, MAGNITUDE: scaled}, layer.alpha, layer.rank)


def change(
    algorithm: Algorithm, tensors: Tensors, scale: float, shape: torch.Size, weight: Tensor | None = None
) -> Tensor:
    """The change of a weight [out, in, *kernel]; can be differentiated with respect to `tensors`."""
    if algorithm in ("ia3", "diag_oft"):
        if weight is None:
            raise ValueError(f"{algorithm} needs the weight it changes")
        return _scaled_rows(tensors, weight) if algorithm == "ia3" else _rotated(tensors, weight)
    added = _ADDED[algorithm](tensors, shape)
    if scale != 1.0:
        added = added * scale
    if MAGNITUDE not in tensors and BASE_MAGNITUDE not in tensors:
        return added
    if weight is None:
        raise ValueError("DoRA needs the weight it changes")
    if BASE_MAGNITUDE in tensors:
        factor = tensors[BASE_MAGNITUDE].flatten() / (_row_norms(weight) + EPSILON)
        return _rows(factor, shape) * (weight + added) - weight
    columns = algorithm != "dora" and _by_columns(tensors[MAGNITUDE], shape)  # peft's are always by rows
    return _normalised(weight + added, tensors[MAGNITUDE], columns=columns) - weight


def _lora(tensors: Tensors, shape: torch.Size) -> Tensor:
    return _shaped(_product(tensors["lora_B.weight"], tensors["lora_A.weight"]), shape)


def _locon(tensors: Tensors, shape: torch.Size) -> Tensor:
    up, down = tensors["lora_up.weight"], tensors["lora_down.weight"]
    core = tensors.get("lora_mid.weight")
    if core is None:
        return _shaped(_product(up, down), shape)
    return _shaped(torch.einsum("ab...,oa,bi->oi...", core, up.flatten(1), down.flatten(1)), shape)


def _product(up: Tensor, down: Tensor) -> Tensor:
    """[out, r, 1, 1] by [r, in, *kernel], as one matrix."""
    return up.flatten(1) @ down.flatten(1)


def _loha(tensors: Tensors, shape: torch.Size) -> Tensor:
    first = _tucker(tensors["hada_w1_a"], tensors["hada_w1_b"], tensors.get("hada_t1"))
    second = _tucker(tensors["hada_w2_a"], tensors["hada_w2_b"], tensors.get("hada_t2"))
    return _shaped(first * second, shape)


def _tucker(left: Tensor, right: Tensor, core: Tensor | None) -> Tensor:
    """[out, r] by [r, in]; with a core [r, r, *kernel] LyCORIS stores the left one as [r, out]."""
    return left @ right if core is None else torch.einsum("ab...,ao,bi->oi...", core, left, right)


def kronecker_factors(tensors: Tensors) -> tuple[Tensor, Tensor]:
    """LoKr's two matrices, [a, c] and [b, d * kernel]; the weight is their Kronecker product."""
    first = tensors.get("lokr_w1")
    if first is None:
        first = tensors["lokr_w1_a"] @ tensors["lokr_w1_b"]
    second = tensors.get("lokr_w2")
    if second is None:
        second = _tucker(tensors["lokr_w2_a"], tensors["lokr_w2_b"], tensors.get("lokr_t2"))
    return first, second.flatten(1)


def _lokr(tensors: Tensors, shape: torch.Size) -> Tensor:
    return _shaped(torch.kron(*kronecker_factors(tensors)), shape)


def _full(tensors: Tensors, shape: torch.Size) -> Tensor:
    return _shaped(tensors["diff"], shape)


def _shaped(change: Tensor, shape: torch.Size) -> Tensor:
    """A kernel may have been flattened into the columns; rows stay rows, or it is another layer's change."""
    _expect(change.shape[0], shape[0], "rows", shape)
    _expect(change.numel(), shape.numel(), "elements", shape)
    return change.reshape(shape)


def _expect(found: int, wanted: int, what: str, shape: torch.Size) -> None:
    if found != wanted:
        raise ValueError(f"{found} {what} for a weight of shape {list(shape)}")


_ADDED = {"lora": _lora, "dora": _lora, "locon": _locon, "loha": _loha, "lokr": _lokr, "full_delta": _full}


def _scaled_rows(tensors: Tensors, weight: Tensor) -> Tensor:
    trailing = (1,) * (weight.dim() - 2)
    on_input = FLAG in tensors and bool(tensors[FLAG].item())
    along = (1, -1, *trailing) if on_input else (-1, 1, *trailing)
    factors = tensors["weight"]
    _expect(factors.numel(), weight.shape[1 if on_input else 0], "factors", weight.shape)
    return weight * factors.reshape(along)


def _rotated(tensors: Tensors, weight: Tensor) -> Tensor:
    blocks = tensors["oft_blocks"]  # [k, n, n]: k blocks of n rows
    _expect(blocks.shape[0] * blocks.shape[1], weight.shape[0], "rows in blocks", weight.shape)
    skew = blocks - blocks.transpose(1, 2)
    identity = torch.eye(blocks.shape[1], device=blocks.device, dtype=blocks.dtype)
    rotation = (identity + skew) @ torch.linalg.inv(identity - skew)
    rows = weight.reshape(blocks.shape[0], blocks.shape[1], -1)
    turned = torch.einsum("knm,kni->kmi", rotation - identity, rows).reshape(weight.shape)
    rescale = tensors.get("rescale")
    if rescale is None:
        return turned
    rescale = rescale.reshape(-1, *(1,) * (weight.dim() - 1))
    return rescale * turned + (rescale - 1) * weight


def _normalised(weight: Tensor, magnitude: Tensor, *, columns: bool) -> Tensor:
    """Rows (the output's) or, in files of older LyCORIS, columns (the input's) of a given length."""
    if not columns:
        return weight * _rows(magnitude.flatten() / (_row_norms(weight) + EPSILON), weight.shape)
    length: Tensor = weight.transpose(0, 1).flatten(1).norm(dim=1)
    trailing = (1,) * (weight.dim() - 2)
    return weight * (magnitude.flatten() / (length + EPSILON)).reshape(1, -1, *trailing)


def _row_norms(weight: Tensor) -> Tensor:
    norms: Tensor = weight.flatten(1).norm(dim=1)
    return norms


def _rows(values: Tensor, shape: torch.Size) -> Tensor:
    return values.reshape(-1, *(1,) * (len(shape) - 1))


def _by_columns(magnitude: Tensor, shape: torch.Size) -> bool:
    """LyCORIS' own way to tell them apart: [1, in, 1, 1] against [out, 1, 1, 1]."""
    return magnitude.dim() > 1 and magnitude.shape[0] == 1 and magnitude.numel() == shape[1] and shape[0] != 1


def _fp32(layer: Layer) -> dict[str, Tensor]:
    return {name: tensor.detach().float() for name, tensor in layer.tensors.items()}


def _described(layer: Layer) -> str:
    return f"{layer.algorithm} with dora_scale" if layer.algorithm not in ("ia3", "diag_oft") else layer.algorithm
