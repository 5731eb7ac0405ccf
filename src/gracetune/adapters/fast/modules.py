"""Linear layers with an adapter: base(x) plus the adapter's output, in the same precision.

Such a module replaces the layer it adapts and keeps it as `base_layer`. The base layer may store its weight in any
form, because it is normally called as a module. There are two exceptions. DoRA reads the weight for its row norms. And
where `can_fuse_base` holds, a fused kernel computes the base layer's product together with the adapter's; hooks on the
base layer are not called then.

All decisions in a forward pass depend on plain attributes, so a compiler sees straight-line code. It compiles at most
three variants for any number of strengths: the base layer alone (strength 0), the adapter unscaled (1), and the adapter
scaled by a strength. That strength is a CPU scalar tensor, which needs neither a copy to the GPU nor a synchronization.

`choice` decides how a layer's adapter is computed, and `FastLayer` attaches a module to a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.computation import Computation
from gracetune.adapters.fast import products
from gracetune.adapters.layer import AttachedLayer, parameter_name
from gracetune.adapters.options import LayerOptions
from gracetune.models.common.attention import SharesInput


@runtime_checkable
class HoldsWeightOtherwise(Protocol):
    """A linear layer whose `weight` is stored in another form, such as fp8 with scales."""

    def plain_weight(self) -> Tensor: ...


class AdaptedLinear(nn.Module):
    def __init__(
        self, base: nn.Linear, tensors: Mapping[str, Tensor], computation: Computation, *, scale: float, dropout: float
    ) -> None:  # fmt: skip
        super().__init__()
        self.base_layer = base
        self.computation = computation
        self.dropout = dropout
        self.scale = scale
        self.set_strength(1.0)
        for name, tensor in tensors.items():
            self.register_parameter(parameter_name(name), nn.Parameter(tensor.to(base.weight.device, torch.float32)))
        self.train(base.training)

    # Attributes of `nn.Linear` that model code reads.

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    @property
    def in_features(self) -> int:
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        return self.base_layer.out_features

    def set_strength(self, strength: float) -> None:
        # `whole`: at full strength, so that the output needs no factor besides `scale`.
        self.active, self.whole = strength != 0, strength == 1
        self.strength = torch.tensor(strength, dtype=torch.float32, device="cpu")

    @property
    def factor(self) -> float | Tensor:
        """The factor of the adapter's output: alpha / rank, times the strength."""
        return self.scale if self.whole else self.scale * self.strength

    def forward(self, x: Tensor) -> Tensor:
        if not self.active:
            return cast(Tensor, self.base_layer(x))
        return self.compute_output(x.to(products.compute_dtype(x)))  # one cast for both the base layer and the adapter

    def compute_output(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        return self.adapted(x, result)

    def adapted(self, x: Tensor, result: Tensor) -> Tensor:
        added = self.added(F.dropout(x, self.dropout) if self.dropout and self.training else x)
        return result + added

    def added(self, x: Tensor) -> Tensor:
        """The adapter's output for `x`, including scale and strength."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.computation.form}, scale={self.scale}, strength={float(self.strength)}, dropout={self.dropout}"

    @property
    def is_fusable(self) -> bool:
        """Whether the fused kernels can compute the adapter: at strength 1 and without dropout."""
        return self.whole and not (self.dropout and self.training)

    def can_fuse_base(self, x: Tensor) -> bool:
        """Whether one fused kernel may compute the base layer's product together with the adapter's for this input."""
        base = self.base_layer
        return type(base) is nn.Linear and self.is_fusable and products.can_fuse_with_kernel(x, base)


class LowRankLinear(SharesInput, AdaptedLinear):
    def factors(self) -> tuple[nn.Parameter, nn.Parameter]:
        """The down and up matrices."""
        raise NotImplementedError

    def compute_output(self, x: Tensor) -> Tensor:
        if self.can_fuse_base(x):
            return products.low_rank_linears(x, [self._low_rank()])[0]
        return super().compute_output(x)

    def _low_rank(self) -> products.LowRankFactors:
        return products.LowRankFactors(*self.factors(), self.scale, self.base_layer.weight, self.base_layer.bias)

    def together(self, x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        """The outputs of several layers for one input, which is then read only once for all adapters."""
        given = x.to(products.compute_dtype(x))
        fusable = [one for one in layers if isinstance(one, LowRankLinear) and one.active and one.is_fusable]
        if len(fusable) < len(layers) or not products.use_half_kernels(given):
            return tuple(layer(x) for layer in layers)
        if all(one.can_fuse_base(given) for one in fusable):
            return products.low_rank_linears(given, [one._low_rank() for one in fusable])
        added = products.low_rank_linears(
            given, [products.LowRankFactors(*one.factors(), one.scale) for one in fusable]
        )
        return tuple(one.base_layer(given) + more for one, more in zip(fusable, added, strict=True))

    def added(self, x: Tensor) -> Tensor:
        return products.low_rank(x, *self.factors(), self.factor)


class LoraLinear(LowRankLinear):
    lora_A_weight: nn.Parameter  # noqa: N815 - the file's name
    lora_B_weight: nn.Parameter  # noqa: N815

    def factors(self) -> tuple[nn.Parameter, nn.Parameter]:
        return self.lora_A_weight, self.lora_B_weight


class LoconLinear(LowRankLinear):
    lora_down_weight: nn.Parameter
    lora_up_weight: nn.Parameter

    def factors(self) -> tuple[nn.Parameter, nn.Parameter]:
        return self.lora_down_weight, self.lora_up_weight


class DoraLinear(AdaptedLinear):
    """m (W + D) / |W + D| by rows. The norm is treated as a constant in the backward pass, as in the paper and in peft.

    A strength between 0 and 1 interpolates between the base layer's output and the adapted output.
    """

    lora_A_weight: nn.Parameter  # noqa: N815
    lora_B_weight: nn.Parameter  # noqa: N815
    dora_scale: nn.Parameter
    row_squares: Tensor

    def __init__(
        self, base: nn.Linear, tensors: Mapping[str, Tensor], computation: Computation, *, scale: float, dropout: float
    ) -> None:  # fmt: skip
        super().__init__(base, tensors, computation, scale=scale, dropout=dropout)
        self.other_form = isinstance(base, HoldsWeightOtherwise)
        # The weight is frozen, so its squared row norms are computed once. They are not saved: they follow from it.
        self.register_buffer("row_squares", row_lengths(base).square(), persistent=False)

    def adapted(self, x: Tensor, result: Tensor) -> Tensor:
        down, up, base = self.lora_A_weight, self.lora_B_weight, self.base_layer
        weight = cast(HoldsWeightOtherwise, base).plain_weight() if self.other_form else base.weight
        length = products.row_norms(weight, self.row_squares, down, up, self.scale)
        added = products.low_rank(x, down, up, self.scale)
        output = products.apply_magnitude(result, base.bias, added, self.dora_scale / length)
        return output if self.whole else result + self.strength * (output - result)


def row_lengths(layer: nn.Linear) -> Tensor:
    """The norms [out] of the weight's rows, in fp32."""
    weight = layer.plain_weight() if isinstance(layer, HoldsWeightOtherwise) else layer.weight
    lengths: Tensor = torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float32)
    return lengths


class LokrLinear(AdaptedLinear):
    """LoKr. Decomposed factors are multiplied out in fp32 and rounded once."""

    def __init__(
        self, base: nn.Linear, tensors: Mapping[str, Tensor], computation: Computation, *, scale: float, dropout: float
    ) -> None:  # fmt: skip
        super().__init__(base, tensors, computation, scale=scale, dropout=dropout)
        for name in ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"):
            if name not in tensors:
                self.register_parameter(name, None)

    lokr_w1: nn.Parameter | None
    lokr_w1_a: nn.Parameter
    lokr_w1_b: nn.Parameter
    lokr_w2: nn.Parameter | None
    lokr_w2_a: nn.Parameter
    lokr_w2_b: nn.Parameter

    @property
    def first(self) -> Tensor:
        return self.lokr_w1 if self.lokr_w1 is not None else products.product(self.lokr_w1_a, self.lokr_w1_b)

    @property
    def second(self) -> Tensor:
        return self.lokr_w2 if self.lokr_w2 is not None else products.product(self.lokr_w2_a, self.lokr_w2_b)

    def compute_output(self, x: Tensor) -> Tensor:
        if self.computation.form == "kronecker" and self.can_fuse_base(x):
            first = self.first
            if products.mixes_in_one_pass(first):
                return products.kronecker_linear(x, self.base_layer, first, self.second, self.scale)
        return super().compute_output(x)

    def added(self, x: Tensor) -> Tensor:
        if self.computation.form == "kronecker by rank":
            return products.kronecker_by_rank(x, self.first, self.lokr_w2_a, self.lokr_w2_b, self.factor)
        return products.kronecker(x, self.first, self.second, self.factor, self.computation)


class LohaLinear(AdaptedLinear):
    hada_w1_a: nn.Parameter
    hada_w1_b: nn.Parameter
    hada_w2_a: nn.Parameter
    hada_w2_b: nn.Parameter

    def added(self, x: Tensor) -> Tensor:
        compute = (
            products.hadamard_by_rank if self.computation.form == "hadamard by rank" else products.hadamard_rebuilt
        )
        factors = (self.hada_w1_a, self.hada_w1_b, self.hada_w2_a, self.hada_w2_b)
        return compute(x, *factors, self.factor)


# -- attaching ---------------------------------------------------------------------------------------------------------


def choice(layer: nn.Module, options: LayerOptions) -> Computation:
    """How this layer's adapter is computed, and the reason."""
    if not isinstance(layer, nn.Linear):
        return reference(layer, options, "convolutions")
    return algorithm(options.algorithm).computation(layer.in_features, layer.out_features, options)


def reference(layer: nn.Module, options: LayerOptions, why: str) -> Computation:
    """The reference computation, with the reason for it."""
    outputs = layer.out_features if isinstance(layer, nn.Linear) else cast(nn.Conv2d, layer).out_channels
    return algorithm(options.algorithm).reference(outputs, options, why)


class FastLayer(AttachedLayer):
    def __init__(
        self, path: str, layer: nn.Linear, options: LayerOptions, computation: Computation, model: nn.Module
    ) -> None:  # fmt: skip
        record = algorithm(options.algorithm)
        tensors, rank = record.first_values(layer, options)
        super().__init__(path, options.algorithm, options.alpha, rank)
        self._names = {name: parameter_name(name) for name in tensors}
        self._base = layer
        self._layer = record.fused_layer()(layer, tensors, computation, scale=self.scale, dropout=options.dropout)
        model.set_submodule(path, self._layer, strict=True)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: self._layer.get_parameter(own) for name, own in self._names.items()}

    def set_strength(self, strength: float) -> None:
        self._layer.set_strength(strength)

    def remove(self, model: nn.Module) -> None:
        model.set_submodule(self.path, self._base, strict=True)
