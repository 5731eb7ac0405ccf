"""Count the FLOPs of a step on the model's own code, on the meta device, without computing anything.

Model FLOPs are all products of the forward pass, and the products of the backward pass that compute gradients of inputs
(dX; frozen weights have no gradient). The backward pass of attention counts as twice its forward pass. Adapters,
recomputation, and the recomputation inside fused attention kernels do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gracetune.bench.step.job import StepJob
from gracetune.bench.step.random_data import random_batch
from gracetune.bench.step.random_model import RandomModel
from gracetune.config.token_routes import TokenRoute, resolve_routes
from gracetune.models.spec import ModelSpec
from gracetune.models.token_routing import KEPT, TokenRouter, block_lists, install
from gracetune.planning.activations import RecomputePolicy


@dataclass(frozen=True)
class Gemm:
    """A matrix product (rows x inputs) @ (inputs x outputs)."""

    rows: int
    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inputs * self.outputs

    def __str__(self) -> str:
        return f"{self.rows} x {self.inputs} x {self.outputs}"


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one step."""

    forward: int
    backward: int
    main: Gemm
    """The product that accounts for most FLOPs of the adapted layers."""

    @property
    def model(self) -> int:
        return self.forward + self.backward

    def hardware(self, policy: RecomputePolicy, share: float | None) -> int | None:
        """FLOPs including recomputation.

        `share` is the share of the forward pass that the compiler recomputes, if known.
        """
        if policy in ("off", "full"):
            return self.model + (self.forward if policy == "full" else 0)
        return None if share is None else self.model + int(share * self.forward)


def count(job: StepJob, model: RandomModel, targets: Sequence[str]) -> StepFlops:
    """Count the FLOPs of a step.

    `targets` are the adapted layers. Gradients of inputs are needed from the first of them on; products before it have
    none.
    """
    denoiser = model.spec.build_denoiser(model.source, model.expert)
    shapes: Counter[Gemm] = Counter()
    trained = torch.zeros((), device="meta", requires_grad=True)
    for path in targets:
        denoiser.get_submodule(path).register_forward_hook(_require_input_gradient(trained, shapes))
    batch = {name: tensor.float() for name, tensor in random_batch(job, model, "meta").items()}
    noisy = torch.empty_like(batch["latents"])
    level = torch.empty(job.batch, device="meta")
    with sdpa_kernel(SDPBackend.MATH):
        forward = FlopCounterMode(display=False)
        with forward:
            prediction = _routed(job, model, denoiser, batch).predict(denoiser, noisy, level, batch, model.facts)
        backward = FlopCounterMode(display=False)
        with backward:
            prediction.sum().backward()
    main = max(shapes, key=lambda shape: shape.flops * shapes[shape])
    return StepFlops(forward.get_total_flops(), backward.get_total_flops(), main)


def _routed(job: StepJob, model: RandomModel, denoiser: nn.Module, batch: dict[str, Tensor]) -> ModelSpec:
    """The family's spec, or with token routing one that routes; `batch` then gets the kept tokens."""
    if not job.routes:
        return model.spec
    blocks = sum(map(len, block_lists(denoiser, model.spec.family)))
    routes = resolve_routes([TokenRoute(**route) for route in job.routes], blocks)
    for number, route in enumerate(routes):
        shape = (job.batch, route.kept(job.tokens))
        batch[KEPT.format(number)] = torch.empty(shape, dtype=torch.int64, device="meta")
    install(denoiser, model.spec.family)
    return TokenRouter(model.spec, routes, model.facts, seed=0).spec


def _require_input_gradient(trained: Tensor, shapes: Counter[Gemm]):  # type: ignore[no-untyped-def]
    """A hook that adds a trainable scalar to a layer's output, so that gradients flow without further products."""

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        width = inputs[0].shape[-1]
        if isinstance(layer, nn.Linear):
            shapes[Gemm(inputs[0].numel() // width, width, output.shape[-1])] += 1
        return output + trained

    return hook
