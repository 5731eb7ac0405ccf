"""LoHa: the change is s (W1a W1b) * (W2a W2b), the elementwise product of two matrices of rank r.

    hada_w1_a, hada_w2_a [out, r]; hada_w1_b, hada_w2_b [r, in * kernel]

In files there may also be hada_t1, hada_t2 (Tucker form) and dora_scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gracetune.adapters.algorithms.assembly import (
    Convention,
    LayerError,
    check_core,
    check_matrices,
    defined_alpha,
    one_rank,
    sides,
)
from gracetune.adapters.algorithms.matrices import (
    core_rejection,
    core_size,
    hadamard_norm,
    is_estimated,
    pairs_of_columns,
    parts_with_core,
    reshape_change,
    svd_of_product,
    tucker,
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

PAIRS_SHARE = 4
"""The product of rank r^2 is used for the SVD if r^2 is at most the weight's shorter side divided by this. Above it,
building the change is cheaper."""
MOST_PAIRED = 1 << 27
"""The most elements of the matrices of pairs: 1 GiB in float64, and a few of them exist at once."""


class Loha(Algorithm):
    name = "loha"
    lycoris_name = "loha"
    rank_is_width = True
    zero_at_first = frozenset({"hada_w2_a"})

    file_tensors = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", "dora_scale")
    needed = frozenset({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"})
    marks = ("hada_",)
    proportional_to = ("hada_w1_a",)

    def shapes(self, layer: WeightShape, options: Options) -> dict[str, Dimensions]:
        left = (layer.outputs, options.rank)
        right = (options.rank, layer.inputs * math.prod(layer.kernel))
        return {"hada_w1_a": left, "hada_w1_b": right, "hada_w2_a": left, "hada_w2_b": right}

    def first_values(self, layer: nn.Module, options: LayerOptions) -> FirstValues:
        from lycoris.modules.loha import LohaModule

        from gracetune.adapters.lycoris import factors_from_lycoris

        return factors_from_lycoris(LohaModule, layer, options), options.rank

    def added(self, tensors: Tensors, shape: torch.Size) -> Tensor:
        first = tucker(tensors["hada_w1_a"], tensors["hada_w1_b"], tensors.get("hada_t1"))
        second = tucker(tensors["hada_w2_a"], tensors["hada_w2_b"], tensors.get("hada_t2"))
        return reshape_change(first * second, shape)

    def norm(self, tensors: Tensors, scale: float) -> float | None:
        right = tensors["hada_w1_b"], tensors["hada_w2_b"]
        rows = zip(*(_rows(tensors, number) for number in "12"), strict=True)
        return abs(scale) * hadamard_norm(rows, right, _count(tensors))

    def estimates_norm(self, tensors: Tensors) -> bool:
        rank, across = tensors["hada_w1_b"].shape
        return is_estimated(_count(tensors), across, rank)

    def singular_vectors(self, tensors: Tensors, scale: float, rank: int) -> SingularVectors | None:
        """The change is a product of rank r^2: the pairwise products of the left factors' columns, times those of the
        right factors' rows."""
        pairs, outputs, across = tensors["hada_w1_b"].shape[0] ** 2, self.outputs(tensors), self.columns(tensors)
        if outputs is None or across is None or pairs * PAIRS_SHARE > min(outputs, across):
            return None
        if pairs * (outputs + across) > MOST_PAIRED:
            return None
        tensors = {name: tensor.detach().double() for name, tensor in tensors.items()}
        lefts, rights = [], []
        for number in "12":
            left, right = tensors[f"hada_w{number}_a"], tensors[f"hada_w{number}_b"]
            core = tensors.get(f"hada_t{number}")
            lefts.append(left if core is None else left.T)
            rights.append(right.T if core is None else with_core(right, core).T)
        left, right = pairs_of_columns(*lefts), pairs_of_columns(*rights).T
        found, values, other = svd_of_product(left * scale, right)
        return found[:, :rank], values[:rank], other[:rank], float(values.norm())

    def computation(self, inputs: int, outputs: int, options: Options) -> Computation:
        """Compare multiplications for each token: r^2 (in + out) by the product of rank r^2, in * out by the change."""
        pairs = options.rank * options.rank
        if pairs * (inputs + outputs) <= inputs * outputs:
            return Computation(
                "hadamard by rank",
                f"two products of width {pairs}",
                kept=pairs,
                compiled_constant=pairs * (inputs + outputs),  # the compiler keeps the factors' pairs
                casts_tensors=False,
            )
        return Computation(
            "hadamard rebuilt",
            f"products of width {pairs} would cost more than the change itself",
            backward_bytes=12,  # both products and the gradient, in fp32
            casts_tensors=False,
        )

    def fused_layer(self) -> type[AdaptedLinear]:
        from gracetune.adapters.fast.modules import LohaLinear

        return LohaLinear

    def least_dimensions(self, tensor: str) -> int:
        return 2 if tensor.startswith("hada_") else 0

    def assemble(self, tensors: Tensors, alpha: float | None, convention: Convention) -> Layer:
        check_matrices(tensors, sorted(self.needed))
        rank = one_rank({name: tensors[name].shape[0] for name in ("hada_w1_b", "hada_w2_b")})
        cores = {"hada_t1", "hada_t2"} & tensors.keys()
        if len(cores) == 1:
            raise LayerError("only one of hada_t1 and hada_t2")
        for first, second in (("hada_w1_a", "hada_w2_a"), ("hada_w1_b", "hada_w2_b"), ("hada_t1", "hada_t2")):
            if first in tensors and tensors[first].shape != tensors[second].shape:
                raise LayerError(f"{first} is {sides(tensors[first])}, {second} {sides(tensors[second])}")
        for name in ("hada_w1_a", "hada_w2_a"):
            inner = tensors[name].shape[0 if cores else 1]
            if inner != rank:
                raise LayerError(f"{name} has rank {inner}, hada_w1_b {rank}")
        check_core(tensors, "hada_t1", rank)
        return Layer("loha", dict(tensors), defined_alpha(alpha, rank, convention), rank)

    def outputs(self, tensors: Tensors) -> int | None:
        return tensors["hada_w1_a"].shape[1 if "hada_t1" in tensors else 0]

    def columns(self, tensors: Tensors) -> int | None:
        return tensors["hada_w1_b"].shape[1] * core_size(tensors.get("hada_t1"))

    def rejection(self, format: str, tensors: Tensors) -> str | None:
        if format != "comfyui":
            return super().rejection(format, tensors)
        return core_rejection(tensors.get("hada_t1")) or core_rejection(tensors.get("hada_t2"))


def _count(tensors: Tensors) -> int:
    """The number of rows of the left matrices; with a core, summed over the points of the kernel."""
    core = tensors.get("hada_t1")
    return tensors["hada_w1_a"].shape[0 if core is None else 1] * core_size(core)


def _rows(tensors: Tensors, number: str) -> Iterator[Tensor]:
    """The rows of one factor's left matrix, in parts; with a core, one matrix for each point of the kernel."""
    left, core = tensors[f"hada_w{number}_a"], tensors.get(f"hada_t{number}")
    return iter((left,)) if core is None else parts_with_core(left.T, core)


ALGORITHM = Loha()
