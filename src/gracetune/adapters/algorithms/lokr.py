"""LoKr: the change is s W1 (x) W2, a Kronecker product. Each factor is whole or a product of two matrices of rank r.

    lokr_w1 [a, c], or lokr_w1_a [a, r] and lokr_w1_b [r, c]
    lokr_w2 [b, d, *kernel], or lokr_w2_a [b, r] and lokr_w2_b [r, d * kernel]

The weight has a * b rows and c * d columns. `adapter.factor` decides how a dimension is split into two.
`adapter.full_rank` keeps both factors whole; the first is decomposed only with `adapter.decompose_both`. In files there
may also be lokr_t2 (Tucker form) and dora_scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.adapters.algorithms.assembly import (
    Convention,
    LayerError,
    check_core,
    check_matrices,
    defined_alpha,
    listed,
    one_rank,
)
from gracetune.adapters.algorithms.matrices import (
    core_size,
    factorization,
    product_norm,
    reshape_change,
    svd_of_product,
    tucker,
    tucker_norm,
    with_core,
)
from gracetune.adapters.algorithms.record import (
    Algorithm,
    Dimensions,
    FirstValues,
    Options,
    SingularVectors,
    Tensors,
    WeightShape,
)
from gracetune.adapters.computation import Computation
from gracetune.adapters.state import Layer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gracetune.adapters.fast.modules import AdaptedLinear
    from gracetune.adapters.options import LayerOptions

KEPT_SHARE = 4
"""Not multiplying W2 out saves work but keeps activations. It is done only if these are at most the input's elements
divided by this."""


@dataclass(frozen=True)
class Kronecker:
    """The factors of LoKr on one matrix: W1 [a, c] and W2 [b, d], each whole or decomposed (`apart`)."""

    first: tuple[int, int]
    second: tuple[int, int]
    rank: int
    first_apart: bool
    second_apart: bool


def kronecker(inputs: int, outputs: int, options: Options) -> Kronecker:
    rank = options.rank
    small_in, large_in = factorization(inputs, options.factor)
    small_out, large_out = factorization(outputs, options.factor)
    return Kronecker(
        first=(small_out, small_in),
        second=(large_out, large_in),
        rank=rank,
        first_apart=options.decompose_both and rank < max(small_out, small_in) / 2 and not options.full_rank,
        second_apart=rank < max(large_out, large_in) / 2 and not options.full_rank,
    )


def cheapest(split: Kronecker) -> Computation:
    """The computation with the fewest multiplications for each token. Each product costs rows * inner * columns."""
    (a, c), (b, d), rank = split.first, split.second, split.rank
    w1_first, w2_first = a * c * d + a * b * d, c * b * d + a * c * b
    apart, kept = rank * (c * d + a * c + a * b), rank * (a + c)
    if split.second_apart and apart < min(w1_first, w2_first) and kept * KEPT_SHARE <= c * d:
        return Computation("kronecker by rank", "products with W2's factors and with W1", kept=kept)
    return Computation("kronecker", "a product with W1 and one with W2", w1_first=w1_first <= w2_first)


@dataclass(frozen=True)
class _Split:
    """The options that LyCORIS infers from a file's factors."""

    rank: int
    factor: int
    full_rank: bool
    decompose_both: bool
    dropout: float = 0.0


def lycoris_can_load(tensors: Tensors, rank: int | None) -> bool:
    """Whether LyCORIS can load these factors. It infers the options, creates factors from them, and fails if the sizes
    differ from the file's."""
    if "lokr_t2" in tensors:
        return False  # LyCORIS reads the rank from the wrong dimension of the second factor
    first, second = (_sides(tensors, name) for name in ("lokr_w1", "lokr_w2"))
    rows, columns = first[0] * second[0], first[1] * second[1]
    factor = -1
    if first != (factorization(rows, -1)[0], factorization(columns, -1)[0]):
        largest = (max(first), max(second))
        in_both = [one for one in largest if one in (first[0], second[0]) and one in (first[1], second[1])]
        factor = in_both[0] if in_both else min(largest)
    apart = ("lokr_w1_a" in tensors, "lokr_w2_a" in tensors)
    options = _Split(rank or 1, factor, full_rank=not any(apart), decompose_both=all(apart))
    if "lokr_w2" in tensors and tensors["lokr_w2"].ndim > 2:
        rows_of, columns_of = factorization(rows, factor), factorization(columns, factor)
        return (first[0], second[0], first[1], second[1]) == (*rows_of, *columns_of)
    # A decomposed factor does not show whether its columns include a kernel. Kernels of these models are 1x1 or 3x3.
    for kernel in (1, 9) if apart[1] and second[1] % 9 == 0 else (1,):
        without = (second[0], second[1] // kernel)
        split = kronecker(first[1] * without[1], rows, options)
        if (split.first, split.second, split.first_apart, split.second_apart) == (first, without, *apart):
            return True
    return False


def _sides(tensors: Tensors, factor: str) -> tuple[int, int]:
    """The rows and columns of a factor. The columns of a whole factor exclude the kernel, those of a decomposed one
    include it."""
    whole = tensors.get(factor)
    if whole is not None:
        return whole.shape[0], whole.shape[1]
    return _rows(tensors, factor), tensors[f"{factor}_b"].shape[1]


class Lokr(Algorithm):
    name = "lokr"
    lycoris_name = "lokr"
    own_options = ("factor", "full_rank", "decompose_both")
    zero_at_first = frozenset({"lokr_w2", "lokr_w2_b"})

    file_tensors = (
        "lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2", "dora_scale"
    )  # fmt: skip
    marks = ("lokr_",)
    proportional_to = ("lokr_w1", "lokr_w1_a")

    def described(self, options: Options) -> str:
        split = [f"factor {options.factor}"] if options.factor > 0 else []
        return " ".join([*split, "full rank" if options.full_rank else super().described(options)])

    def shapes(self, layer: WeightShape, options: Options) -> dict[str, Dimensions]:
        split = kronecker(layer.inputs, layer.outputs, options)
        shapes: dict[str, Dimensions] = {}
        for name, (rows, columns), apart, kernel in (
            ("lokr_w1", split.first, split.first_apart, ()),
            ("lokr_w2", split.second, split.second_apart, layer.kernel),  # the second factor has the kernel
        ):
            if apart:
                shapes[f"{name}_a"] = (rows, split.rank)
                shapes[f"{name}_b"] = (split.rank, columns * math.prod(kernel))
            else:
                shapes[name] = (rows, columns, *kernel)
        return shapes

    def first_values(self, layer: nn.Module, options: LayerOptions) -> FirstValues:
        from lycoris.modules.lokr import LokrModule

        from gracetune.adapters.lycoris import factors_from_lycoris

        tensors = factors_from_lycoris(
            LokrModule,
            layer,
            options,
            factor=options.factor,
            decompose_both=options.decompose_both,
            full_matrix=options.full_rank,
        )
        whole = "lokr_w1" in tensors and "lokr_w2" in tensors
        return tensors, None if whole else options.rank

    def added(self, tensors: Tensors, shape: torch.Size) -> Tensor:
        import torch

        return reshape_change(torch.kron(*_factors(tensors)), shape)

    def norm(self, tensors: Tensors, scale: float) -> float | None:
        norms = (_norm(tensors, factor) for factor in ("lokr_w1", "lokr_w2"))
        return abs(scale) * math.prod(norms)

    def singular_vectors(self, tensors: Tensors, scale: float, rank: int) -> SingularVectors | None:
        """The singular vectors and values of a Kronecker product are Kronecker products of its factors'."""
        import torch

        tensors = {name: tensor.detach().double() for name, tensor in tensors.items()}
        (u1, s1, v1), (u2, s2, v2) = (_singular_vectors(tensors, factor) for factor in ("lokr_w1", "lokr_w2"))
        values = scale * torch.outer(s1, s2)
        kept = values.abs().flatten().topk(min(rank, values.numel())).indices
        first, second = kept // len(s2), kept % len(s2)
        left = torch.einsum("ak,bk->abk", u1[:, first], u2[:, second]).flatten(0, 1)
        right = torch.einsum("kc,kd->kcd", v1[first], v2[second]).flatten(1)
        return left, values.flatten()[kept], right, float(values.norm())

    def computation(self, inputs: int, outputs: int, options: Options) -> Computation:
        return cheapest(kronecker(inputs, outputs, options))

    def fused_layer(self) -> type[AdaptedLinear]:
        from gracetune.adapters.fast.modules import LokrLinear

        return LokrLinear

    def claims(self, names: set[str]) -> bool:
        if not any(name.startswith("lokr_") for name in names):
            return False
        others = {name for name in names if not name.startswith("lokr_") and name != "dora_scale"}
        if others:
            raise LayerError(f"LoKr together with {listed(others)}")
        return True

    def least_dimensions(self, tensor: str) -> int:
        return 2 if tensor.startswith("lokr_") else 0

    def assemble(self, tensors: Tensors, alpha: float | None, convention: Convention) -> Layer:
        ranks: dict[str, int] = {}
        check_matrices(tensors, ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b"))
        for factor in ("lokr_w1", "lokr_w2"):
            parts = {f"{factor}_a", f"{factor}_b"} & tensors.keys()
            if factor in tensors and parts:
                raise LayerError(f"{factor} both whole and decomposed")
            if factor not in tensors and len(parts) < 2:
                raise LayerError(f"neither {factor} nor both {factor}_a and {factor}_b")
            if parts:
                inner = tensors[f"{factor}_b"].shape[0]
                outer = tensors[f"{factor}_a"].shape[0 if factor == "lokr_w2" and "lokr_t2" in tensors else 1]
                if inner != outer:
                    raise LayerError(f"{factor}_a has rank {outer}, {factor}_b {inner}")
                ranks[factor] = inner
        if "lokr_t2" in tensors and "lokr_w2" not in ranks:
            raise LayerError("lokr_t2 without lokr_w2_a and lokr_w2_b")
        if not ranks:
            # No factor is decomposed, so alpha has no effect. ai-toolkit writes 9999999999 here, which is inf in fp16.
            return Layer("lokr", dict(tensors), 1.0, None)
        rank = one_rank(ranks)
        check_core(tensors, "lokr_t2", rank)
        return Layer("lokr", dict(tensors), defined_alpha(alpha, rank, convention), rank)

    def outputs(self, tensors: Tensors) -> int | None:
        return _rows(tensors, "lokr_w1") * _rows(tensors, "lokr_w2")

    def columns(self, tensors: Tensors) -> int | None:
        second = tensors.get("lokr_w2")
        if second is None:
            inner = tensors["lokr_w2_b"].shape[1] * core_size(tensors.get("lokr_t2"))
        else:
            inner = math.prod(second.shape[1:])
        first = tensors.get("lokr_w1")
        return (tensors["lokr_w1_b"] if first is None else first).shape[1] * inner

    def rejection(self, format: str, tensors: Tensors) -> str | None:
        if format != "comfyui":
            return super().rejection(format, tensors)
        if "lokr_t2" in tensors:
            return "torch.kron rejects what ComfyUI builds of LoKr's Tucker form, and ComfyUI then leaves the layer out"
        second = tensors.get("lokr_w2")
        if second is not None and second.ndim not in (2, 4):
            return "ComfyUI multiplies Kronecker factors of matrices and 2-d convolutions only"
        return None


def _factors(tensors: Tensors) -> tuple[Tensor, Tensor]:
    """The two matrices, [a, c] and [b, d * kernel]; the change is their Kronecker product."""
    first = tensors.get("lokr_w1")
    if first is None:
        first = tensors["lokr_w1_a"] @ tensors["lokr_w1_b"]
    second = tensors.get("lokr_w2")
    if second is None:
        second = tucker(tensors["lokr_w2_a"], tensors["lokr_w2_b"], tensors.get("lokr_t2"))
    return first, second.flatten(1)


def _norm(tensors: Tensors, factor: str) -> float:
    whole, core = tensors.get(factor), tensors.get("lokr_t2")
    if whole is not None:
        return float(whole.double().norm())
    left, right = tensors[f"{factor}_a"], tensors[f"{factor}_b"]
    if factor == "lokr_w1" or core is None:
        return product_norm(left, right)
    return tucker_norm(left, right, core)


def _singular_vectors(tensors: Tensors, factor: str) -> tuple[Tensor, Tensor, Tensor]:
    whole, core = tensors.get(factor), tensors.get("lokr_t2")
    if whole is not None:
        import torch

        left, values, right = torch.linalg.svd(whole.flatten(1), full_matrices=False)
        return left, values, right
    left, right = tensors[f"{factor}_a"], tensors[f"{factor}_b"]
    if factor == "lokr_w1" or core is None:
        return svd_of_product(left, right)
    return svd_of_product(left.T, with_core(right, core))


def _rows(tensors: Tensors, factor: str) -> int:
    if factor in tensors:
        return tensors[factor].shape[0]
    return tensors[f"{factor}_a"].shape[1 if factor == "lokr_w2" and "lokr_t2" in tensors else 0]


ALGORITHM = Lokr()
