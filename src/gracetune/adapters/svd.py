"""Converts any adapter to the nearest LoRA of a given rank, and reports the error.

The SVD is exact (in float64) for small matrices, for every LoRA, LoCon and LoKr, and for LoHa of a small rank. The SVD
of a product L R needs only the QR triangles of L and R; the singular vectors of a Kronecker product are Kronecker
products of its factors' singular vectors. Larger matrices are first projected on a random subspace, which finds the
leading vectors to many digits (randomized SVD with power iterations). The reported error is computed exactly or
measured on the change; it is not an estimate. A change that must be built and does not fit into memory is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.delta import apply, bias_delta, delta, misfit, needs_weight
from gracetune.adapters.state import AdapterState, Layer
from gracetune.errors import ConfigError, Problem
from gracetune.hostmem.sensors import HostSensor
from gracetune.units import format_bytes

EXACT_UP_TO = 1536
"""The longest shorter side for an exact SVD: about a second on one core."""
_BYTES_PER_ELEMENT = 40
"""Peak memory for each element of the change: once in fp32 and four times in float64, rounded up. Singular vectors need
at most as much."""
_OVERSAMPLING, _ITERATIONS, _SEED = 16, 6, 0


@dataclass(frozen=True)
class Conversion:
    state: AdapterState
    errors: Mapping[str, float]
    """Relative Frobenius error of each layer's change."""
    error: float
    """The relative Frobenius error of all changes together."""


def state_to_lora(
    state: AdapterState,
    rank: int,
    weight: Callable[[str], Tensor | Sequence[int]],
) -> Conversion:
    """Convert all layers. `weight` returns the base weight at a path, or its shape if the change does not need it."""
    sensor = HostSensor()
    layers: dict[str, Layer] = {}
    errors: dict[str, float] = {}
    missed_all = norm_all = 0.0
    for path, layer in state.layers.items():
        layers[path], missed, norm = _converted(path, layer, rank, weight(path), sensor)
        errors[path] = missed / norm if norm else 0.0
        missed_all, norm_all = math.hypot(missed_all, missed), math.hypot(norm_all, norm)
    converted = AdapterState(state.family, state.expert, layers, state.metadata)
    return Conversion(converted, errors, missed_all / norm_all if norm_all else 0.0)


def _converted(
    path: str, layer: Layer, rank: int, weight: Tensor | Sequence[int], sensor: HostSensor
) -> tuple[Layer, float, float]:
    """The LoRA, the norm of what it misses, and the norm of the change."""
    bias = bias_delta(layer)
    if bias is not None and bool(bias.any()):
        hint = "merge it into the model instead: --merge-into MODEL"
        raise ConfigError([Problem(f"{path}.diff_b", "a change of the bias", "changes of weights alone", hint)])
    shape = weight.shape if isinstance(weight, Tensor) else torch.Size(weight)
    unfit = misfit(layer, shape)
    if unfit is not None:
        hint = "give the model it was trained on; gracetune adapter verify shows what fits"
        raise ConfigError([Problem(path, unfit, "a layer of the base model's size", hint)])
    diverged = Problem(
        path, "a change beyond the range of numbers", "finite numbers",
        "take an earlier checkpoint: the training run has diverged",
    )  # fmt: skip
    try:
        left, values, right, missed, norm = _decomposed(layer, rank, weight, shape, sensor)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # LAPACK raises this for infinite values
        raise ConfigError([diverged]) from None
    converted = _lora_layer(left, values, right, shape)
    if not all(bool(tensor.isfinite().all()) for tensor in converted.tensors.values()):  # too large for fp32
        raise ConfigError([diverged])
    return converted, missed, norm


def _decomposed(
    layer: Layer, rank: int, weight: Tensor | Sequence[int], shape: torch.Size, sensor: HostSensor
) -> tuple[Tensor, Tensor, Tensor, float, float]:
    """Left vectors [out, r], values [r], right vectors [r, in * kernel], the norm of the residual, and the norm of the
    change."""
    record, rank = algorithm(layer.algorithm), min(rank, shape.numel())
    vectors = min(rank, shape[0], shape[1:].numel()) * (shape[0] + shape[1:].numel())
    _reject_too_large(vectors, shape, layer.algorithm, sensor)
    exact = None if needs_weight(layer) else record.singular_vectors(layer.tensors, layer.scale, rank)
    if exact is not None:
        left, values, right, norm = exact
        return left, values, right, math.sqrt(max(0.0, norm**2 - float(values.square().sum()))), norm
    _reject_too_large(shape.numel(), shape, layer.algorithm, sensor)
    change = _change(layer, weight, shape).flatten(1).double()
    left, values, right = _leading(change, rank)
    return left, values, right, float((change - (left * values) @ right).norm()), float(change.norm())


def _reject_too_large(numbers: int, shape: torch.Size, kind: str, sensor: HostSensor) -> None:
    """Raise `ConfigError` if this would exceed the free memory: otherwise the kernel would kill the process.

    `numbers` is the element count of the largest matrices.
    """
    needed, free = numbers * _BYTES_PER_ELEMENT, sensor.read().headroom
    if free is None or needed <= free:
        return
    found = f"a {kind} of {shape[0]:,} x {shape[1:].numel():,}: about {format_bytes(needed)} to decompose it"
    hint = "a machine with more memory; --to lycoris or --merge-into MODEL need no more than the layer"
    raise ConfigError([Problem("--lora-rank", found, f"at most the {format_bytes(free)} that are free here", hint)])


def _change(layer: Layer, weight: Tensor | Sequence[int], shape: torch.Size) -> Tensor:
    if not needs_weight(layer):
        return delta(layer, shape)
    if not isinstance(weight, Tensor):
        raise ValueError(f"what {layer.algorithm} changes depends on the weight: give it, not its shape")
    return apply(layer, weight) - weight.detach().float()


def _leading(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    rank = min(rank, *matrix.shape)
    if min(matrix.shape) > EXACT_UP_TO and rank + _OVERSAMPLING < min(matrix.shape):
        basis = _range(matrix, rank + _OVERSAMPLING)
        left, values, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
        left = basis @ left
    else:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left[:, :rank], values[:rank], right[:rank]


def _range(matrix: Tensor, width: int) -> Tensor:
    """An orthonormal basis [rows, width] close to the span of the leading singular vectors, by power iteration.

    The QR after each product keeps the columns from collapsing onto the first singular vector.
    """
    generator = torch.Generator().manual_seed(_SEED)
    start = torch.randn(matrix.shape[1], width, generator=generator, dtype=matrix.dtype).to(matrix.device)
    basis: Tensor = torch.linalg.qr(matrix @ start).Q
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    return basis


def _lora_layer(left: Tensor, values: Tensor, right: Tensor, shape: torch.Size) -> Layer:
    """A LoRA layer from an SVD. Each factor gets the square root of the singular values, so that neither underflows in
    half precision."""
    rank, kernel = len(values), shape[2:]
    root = values.abs().sqrt()
    down = (root[:, None] * right).float().reshape(rank, shape[1], *kernel)
    up = (left * (root * values.sign())).float().reshape(shape[0], rank, *(1 for _ in kernel))
    tensors = {"lora_A.weight": down.contiguous(), "lora_B.weight": up.contiguous()}
    return Layer("lora", tensors, float(rank), rank)
