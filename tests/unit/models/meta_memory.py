"""The memory of a training step, measured with real model classes on the meta device.

Tensors on the meta device have shapes and storages but no bytes, and autograd works on them as on any other. So the
storages alive at each moment of a real forward and backward pass can be added up, for a 14B model, in a second. Three
things are replaced to behave as on a GPU: fused attention (which never makes the attention matrix), the fused RMS norm
(which keeps its input and one number a row), and adapters, of which only what they keep matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from gracetune.planning.tracing.memory import AliveTensors

BF16 = torch.bfloat16


class _FusedAttention(torch.autograd.Function):
    """Queries, keys and values as (batch, tokens, heads, width); keeps them, its output and one number per row."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(query)  # in the layout of the queries, as CUDA's kernels return it
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, rows)
        return output

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> Any:
        query, key, value, _output, rows = ctx.saved_tensors
        _accumulator, _row_sums = torch.empty_like(query, dtype=torch.float32), torch.empty_like(rows)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _FusedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> Any:
        hidden, weight, _rows = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weight) if weight.requires_grad else None


def use_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace attention and norms by operators that save what a GPU's save."""
    from diffusers.models.transformers import (
        transformer_flux,
        transformer_qwenimage,
        transformer_wan,
        transformer_z_image,
    )

    def attention(query: Any, key: Any, value: Any, **_rest: Any) -> Any:
        return _FusedAttention.apply(query, key, value)

    def heads_first(query: Any, key: Any, value: Any, *_mask: Any, **_rest: Any) -> Any:
        swapped = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return _FusedAttention.apply(*swapped).transpose(1, 2)

    def rms_norm(hidden: Any, _shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        return _FusedRmsNorm.apply(hidden, weight)

    for module in (transformer_flux, transformer_qwenimage, transformer_wan, transformer_z_image):
        monkeypatch.setattr(module, "dispatch_attention_fn", attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", heads_first)
    monkeypatch.setattr(F, "rms_norm", rms_norm)


class LoraLinear(nn.Module):
    """LoRA on a frozen matrix. `copies` copies the input, as peft does for an fp32 adapter under autocast."""

    def __init__(self, base: nn.Linear, rank: int = 16, *, copies: bool = False) -> None:
        super().__init__()
        self.base, self.copies = base, copies
        self.down = nn.Parameter(torch.empty(rank, base.in_features, dtype=torch.float32))
        self.up = nn.Parameter(torch.empty(base.out_features, rank, dtype=torch.float32))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        own = hidden.float().to(hidden.dtype) if self.copies else hidden
        update = F.linear(F.linear(own, self.down.to(hidden.dtype)), self.up.to(hidden.dtype))
        return self.base(hidden) + update


class RebuiltLinear(nn.Module):
    """A full-rank LoKr the way LyCORIS computes it: the whole weight is rebuilt in every forward pass."""

    def __init__(self, base: nn.Linear, factor: int = 16) -> None:
        super().__init__()
        self.base = base
        self.small = nn.Parameter(torch.empty(factor, factor))
        self.large = nn.Parameter(torch.empty(base.out_features // factor, base.in_features // factor))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.base.weight + torch.kron(self.small, self.large)
        return F.linear(hidden, weight.to(hidden.dtype), self.base.bias)


def adapt(model: nn.Module, names: set[str], wrap: Callable[[nn.Linear], nn.Module]) -> int:
    """Wrap every linear layer whose name inside its block is in `names`, and return their number."""
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "." in name and any(name.endswith(f".{wanted}") for wanted in names)
    ]
    for name in found:
        parent, _, last = name.rpartition(".")
        holder = model.get_submodule(parent)
        linear = holder.get_submodule(last)
        assert isinstance(linear, nn.Linear)
        holder.register_module(last, wrap(linear))
    return len(found)


@dataclass(frozen=True)
class Step:
    """Bytes alive, not counting parameters, gradients and inputs."""

    after_forward: int
    peak: int


def train_step(model: nn.Module, inputs: dict[str, Any], *, checkpointing: bool) -> Step:
    """One forward and backward pass. Parameters, their gradients and the inputs are not counted."""
    model.train()
    if checkpointing:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    alive = AliveTensors([*model.parameters(), *model.buffers(), *gradients, *given])
    with torch.device("meta"), alive:
        output = model(**inputs, return_dict=False)[0]
        output = torch.stack(output) if isinstance(output, list) else output
        after_forward = alive.now
        output.float().square().mean().backward()
    return Step(after_forward, alive.peak)


def inference_peak(model: nn.Module, call: Callable[[], Any]) -> int:
    """Peak bytes of a pass without gradients, not counting the parameters."""
    alive = AliveTensors([*model.parameters(), *model.buffers()])
    with torch.no_grad(), torch.device("meta"), alive:
        call()
    return alive.peak


@contextmanager
def on_meta(dtype: torch.dtype = BF16) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
