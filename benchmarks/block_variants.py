"""Ways of computing a Wan block's adapters, timed on a few blocks: what is worth building into `adapters/fast`?

python benchmarks/block_variants.py --output benchmarks/results/block-variants-NAME.json

A chain of compiled blocks of the published width, forward and backward, adapters as fp32 parameters under bf16
autocast. A block takes a fortieth of a 14B step, compiles in seconds and needs 2 GiB, so many ideas are tried in the
time of one bench of the whole model. These are experiments: what wins is written again where it belongs.

    frozen      no adapter: the floor
    lora        the trainer's own layers
    joined      q, k and v (k and v in the cross attention) as one frozen product, with one product down to all ranks
    widened     [x, down x] [W, up]': the rank is 16 more columns of the frozen product, in both passes
    widest      joined and widened: one product has q, k, v and their adapters
    lora-fp8    the trainer's own layers on fp8 weights;  joined-fp8: joined on those
    lokr        the trainer's own layers;  lokr-sum: W1 as sixteen multiplications the compiler fuses with the addition
    flash, cudnn    lora, with attention held to that kernel
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gracetune.adapters.attach import attach
from gracetune.adapters.fast.modules import LokrLinear, LoraLinear
from gracetune.adapters.fast.products import in_own_precision
from gracetune.bench.results import result_of, write_result
from gracetune.bench.row import BenchRow
from gracetune.bench.step.clock import free, measure
from gracetune.bench.step.random_model import random_weights
from gracetune.cli.bench import print_rows
from gracetune.cli.console import out
from gracetune.config.run_config import Adapter
from gracetune.hardware import probe
from gracetune.models.eight_bit_linear import Fp8Linear
from gracetune.models.registry import spec_of
from gracetune.models.wan.load import use_fused_operations

RANK: Final = 16
KEPT_EXACT: Final = ("norm1", "norm2", "norm3")
"""diffusers holds these, and the table of shifts, in fp32."""


@dataclass(frozen=True)
class Size:
    heads: int = 40
    """Of 128 channels each."""
    ffn: int = 13824
    image_tokens: int = 4096
    text_tokens: int = 512
    blocks: int = 4

    @property
    def width(self) -> int:
        return self.heads * 128


class Chain(nn.Module):
    """Under the names the family's targets have."""

    def __init__(self, size: Size, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.device(device):
            made = [
                WanTransformerBlock(size.width, size.ffn, size.heads, cross_attn_norm=True, eps=1e-6)
                for _ in range(size.blocks)
            ]
        self.blocks = nn.ModuleList(made)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(False)
            if not (set(name.split(".")) & {*KEPT_EXACT, "scale_shift_table"}):
                parameter.data = parameter.data.to(dtype)
        random_weights(0)(self, dict(self.named_parameters()))
        use_fused_operations(self)

    def forward(self, x: Tensor, text: Tensor, time: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        for block in self.blocks:
            x = block(x, text, time, positions)
        return x

    @property
    def trained(self) -> list[nn.Parameter]:
        return [one for one in self.parameters() if one.requires_grad]

    @property
    def attentions(self) -> Iterator[Any]:
        for block in self.blocks:
            yield block.attn1
            yield block.attn2


# -- ways -------------------------------------------------------------------------------------------------------------


def frozen(_chain: Chain) -> None:
    pass


def adapted(chain: Chain, kind: str = "lora") -> None:
    options = {"kind": kind, "rank": RANK} if kind == "lora" else {"kind": kind, "factor": 16, "full_rank": True}
    attach(
        chain, Adapter.model_validate(options), family="wan", default_targets=spec_of("wan").default_targets, seed=0
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    for parameter in chain.trained:  # an adapter that adds nothing would hide a mistake
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=draw).to(parameter.device)


def in_fp8(chain: Chain) -> None:
    for path, module in list(chain.named_modules()):
        if isinstance(module, nn.Linear) and not isinstance(module, Fp8Linear):
            chain.set_submodule(path, Fp8Linear(module.weight, module.bias), strict=True)
    adapted(chain)


def joined(chain: Chain, make: Callable[[Sequence[LoraLinear]], nn.Module] | None = None) -> None:
    adapted(chain)
    _join(chain, make or JoinedLora)


def joined_fp8(chain: Chain) -> None:
    adapted(chain)
    _join(chain, lambda layers: JoinedLora(layers, Fp8Linear))
    for path, module in list(chain.named_modules()):
        if type(module) is nn.Linear:
            chain.set_submodule(path, Fp8Linear(module.weight, module.bias), strict=True)


def widened(chain: Chain) -> None:
    adapted(chain)
    _widen(chain)


def widest(chain: Chain) -> None:
    joined(chain, WidenedLora)
    _widen(chain)


def lokr_sum(chain: Chain) -> None:
    adapted(chain, "lokr")
    for path, module in list(chain.named_modules()):
        if isinstance(module, LokrLinear):
            chain.set_submodule(path, LokrBySum(module), strict=True)


def _widen(chain: Chain) -> None:
    for path, module in list(chain.named_modules()):
        if isinstance(module, LoraLinear):
            chain.set_submodule(path, WidenedLora([module]), strict=True)


def _join(chain: Chain, make: Callable[[Sequence[LoraLinear]], nn.Module]) -> None:
    """By the way diffusers' own processor takes for fused projections."""
    for attention in chain.attentions:
        cross = attention.is_cross_attention
        parts = [attention.to_k, attention.to_v] if cross else [attention.to_q, attention.to_k, attention.to_v]
        setattr(attention, "to_kv" if cross else "to_qkv", make(parts))
        del attention.to_k, attention.to_v
        if not cross:
            del attention.to_q
        attention.fused_projections = True


class JoinedLora(nn.Module):
    def __init__(self, layers: Sequence[LoraLinear], kind: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        weight = torch.cat([one.weight.data for one in layers])
        bias = nn.Parameter(torch.cat([_bias(one) for one in layers]), requires_grad=False)
        if kind is Fp8Linear:
            self.base: nn.Linear = Fp8Linear(weight, bias)
        else:
            with torch.device("meta"):
                self.base = nn.Linear(weight.shape[1], weight.shape[0])
            self.base.weight, self.base.bias = nn.Parameter(weight, requires_grad=False), bias
        self.down = nn.Parameter(torch.cat([one.lora_A_weight.data for one in layers]))
        self.ups = nn.ParameterList([one.lora_B_weight.data for one in layers])
        self.scale = layers[0].scale

    def forward(self, x: Tensor) -> Tensor:
        narrow = F.linear(x, self.down.to(x.dtype)).chunk(len(self.ups), dim=-1)
        added = [F.linear(one, (up * self.scale).to(x.dtype)) for one, up in zip(narrow, self.ups, strict=True)]
        result: Tensor = self.base(x)
        return result + torch.cat(added, dim=-1)


class WidenedLora(nn.Module):
    """Of one layer, or of several that are given the same input."""

    def __init__(self, layers: Sequence[LoraLinear]) -> None:
        super().__init__()
        self.scale, self.inputs = layers[0].scale, layers[0].in_features
        self.outputs = [one.out_features for one in layers]
        self.ranks = [one.lora_A_weight.shape[0] for one in layers]
        self.down = nn.Parameter(torch.cat([one.lora_A_weight.data for one in layers]))
        self.ups = nn.ParameterList([one.lora_B_weight.data for one in layers])
        weight = torch.cat([one.weight.data for one in layers])
        wide = weight.new_zeros(weight.shape[0], self.inputs + sum(self.ranks))
        wide[:, : self.inputs] = weight
        self.register_buffer("wide", wide)
        self.register_buffer("bias", torch.cat([_bias(one) for one in layers]))
        self.refresh()

    wide: Tensor
    bias: Tensor

    @torch.no_grad()
    def refresh(self) -> None:
        """Once for each step of the optimizer."""
        row, column = 0, self.inputs
        for up, outputs, rank in zip(self.ups, self.outputs, self.ranks, strict=True):
            self.wide[row : row + outputs, column : column + rank].copy_(up * self.scale)
            row, column = row + outputs, column + rank

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.inputs)
        ups = [self.ups[one] for one in range(len(self.ranks))]  # torch 2.11 cannot compile `*self.ups`
        result: Tensor = _Widened.apply(rows, self.down.to(x.dtype), self.wide, self.bias, self.scale, *ups)  # type: ignore[no-untyped-call]
        return result.reshape(*x.shape[:-1], sum(self.outputs))


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, wide: Tensor, bias: Tensor, scale: float, *ups: Tensor) -> Tensor:
        ctx.scale, ctx.shapes = scale, [(up.shape[0], up.shape[1]) for up in ups]
        with in_own_precision(x):
            both = torch.cat([x, F.linear(x, down)], dim=1)
            ctx.save_for_backward(both, down, wide)
            return F.linear(both, wide, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        both, down, wide = ctx.saved_tensors
        inputs = down.shape[1]
        with in_own_precision(gradient):
            back = gradient.mm(wide)
            narrow = back[:, inputs:]
            dx = torch.addmm(back[:, :inputs], narrow, down)
            d_down = narrow.t().mm(both[:, :inputs])
            row, column, d_ups = 0, inputs, []
            for outputs, rank in ctx.shapes:
                own = gradient[:, row : row + outputs].t().mm(both[:, column : column + rank])
                d_ups.append(own.float() * ctx.scale)
                row, column = row + outputs, column + rank
        return dx, d_down, None, None, None, *d_ups


class LokrBySum(nn.Module):
    def __init__(self, layer: LokrLinear) -> None:
        super().__init__()
        assert layer.lokr_w1 is not None
        assert layer.lokr_w2 is not None
        self.base, self.scale = layer.base_layer, layer.scale
        self.w1, self.w2 = nn.Parameter(layer.lokr_w1.data), nn.Parameter(layer.lokr_w2.data)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.w1.shape[1], self.w2.shape[1])
        added: Tensor = _BySum.apply(rows, (self.w1 * self.scale).to(x.dtype), self.w2.to(x.dtype))  # type: ignore[no-untyped-call]
        result: Tensor = self.base(x)
        return result + added.reshape(result.shape)


class _BySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        ctx.save_for_backward(x, w1, w2)
        with in_own_precision(x):
            return _by_sum(w1, F.linear(x, w2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w1, w2 = ctx.saved_tensors
        with in_own_precision(x):
            wide = gradient.matmul(w2)
            dx = _by_sum(w1.t(), wide) if ctx.needs_input_grad[0] else None
            dw1 = torch.bmm(wide, x.transpose(1, 2)).sum(0, dtype=torch.float32).to(w1.dtype)
            back = _by_sum(w1.t(), gradient)
            dw2 = back.reshape(-1, w2.shape[0]).t().mm(x.reshape(-1, w2.shape[1]))
        return dx, dw1, dw2


def _by_sum(small: Tensor, rows: Tensor) -> Tensor:
    """small [p, q] on each of rows [n, q, k], in fp32 and rounded once."""
    wide = rows.float()
    total = small[:, 0].float()[None, :, None] * wide[:, :1]
    for one in range(1, small.shape[1]):
        total = total + small[:, one].float()[None, :, None] * wide[:, one : one + 1]
    return total.to(rows.dtype)


def _bias(layer: LoraLinear) -> Tensor:
    bias = layer.bias
    assert bias is not None  # every projection of Wan has one
    return bias.data


@dataclass(frozen=True)
class Way:
    prepare: Callable[[Chain], None]
    attention: SDPBackend | None = None
    same_as: str = ""
    """Whose numbers these are, in exact arithmetic."""


WAYS: Final[Mapping[str, Way]] = {
    "frozen": Way(frozen),
    "lora": Way(adapted),
    "joined": Way(joined, same_as="lora"),
    "widened": Way(widened, same_as="lora"),
    "widest": Way(widest, same_as="lora"),
    "flash": Way(adapted, SDPBackend.FLASH_ATTENTION, same_as="lora"),
    "cudnn": Way(adapted, SDPBackend.CUDNN_ATTENTION, same_as="lora"),
    "lokr": Way(lambda chain: adapted(chain, "lokr")),
    "lokr-sum": Way(lokr_sum, same_as="lokr"),
    "lora-fp8": Way(in_fp8),
    "joined-fp8": Way(joined_fp8, same_as="lora-fp8"),
}


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Step:
    """Forward and backward; the input has a gradient, as behind a block before it."""

    chain: Chain
    inputs: tuple[Any, ...]
    attention: SDPBackend | None
    precision: torch.dtype

    def __call__(self) -> Tensor:
        for module in self.chain.modules():
            if isinstance(module, WidenedLora):
                module.refresh()
        prediction = self.prediction()
        self.chain.zero_grad(set_to_none=True)
        prediction.backward(self.inputs[0].detach())
        return prediction.detach()[0, 0, 0]

    def prediction(self) -> Tensor:
        device = self.inputs[0].device
        held: AbstractContextManager[object] = nullcontext() if self.attention is None else sdpa_kernel(self.attention)
        lowered = self.precision != torch.float32
        with held, torch.autocast(device.type, self.precision) if lowered else nullcontext():
            result: Tensor = self.chain(*self.inputs)
        return result


def step_of(way: Way, size: Size, device: torch.device, dtype: torch.dtype, *, compiled: bool) -> Step:
    chain = Chain(size, device, dtype)
    way.prepare(chain)
    if compiled:
        for block in chain.blocks:
            block.compile()
    draw = torch.Generator(device).manual_seed(2)

    def random_tensor(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=draw, device=device, dtype=torch.float32).to(kind)

    angles = random_tensor(1, size.image_tokens, 1, 128, kind=torch.float32)
    inputs = (
        random_tensor(1, size.image_tokens, size.width).requires_grad_(),
        random_tensor(1, size.text_tokens, size.width),
        random_tensor(1, 6, size.width, kind=torch.float32),
        (angles.cos(), angles.sin()),
    )
    return Step(chain, inputs, way.attention, dtype)


def gradient_size(step: Step) -> tuple[float, float]:
    """Of the answer and of the adapters' gradients: the same for two ways that are the same."""
    step()
    with torch.no_grad():
        norm = float(step.prediction().double().norm())
    return norm, float(sum(one.grad.double().square().sum() for one in step.chain.trained if one.grad is not None))


def kernels_of(step: Step) -> tuple[int, float]:
    """How many kernels a step has, and the milliseconds they take together."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = [one for one in profile.events() if one.device_type.name == "CUDA"]
    return len(events), sum(one.self_device_time_total for one in events) / 1000


def rows(names: Sequence[str], size: Size, device: torch.device, samples: int) -> Iterator[BenchRow]:
    floor: float | None = None
    for name in names:
        step = step_of(WAYS[name], size, device, torch.bfloat16, compiled=device.type == "cuda")
        pace = measure(step, device, samples)
        each = pace.ms / size.blocks
        floor = each if name == "frozen" else floor
        message = f"first step {pace.first_s:.0f} s"
        if device.type == "cuda":
            count, busy = kernels_of(step)
            message += f"; {count / size.blocks:.0f} kernels a block, {busy / size.blocks:.2f} ms of them"
        if floor is not None:
            message += f"; {each - floor:+.2f} ms against no adapter"
        yield BenchRow(name, each, "ms a block", detail=message)
        del step
        free(device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*WAYS], action="append", help="all without it")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--image-tokens", type=int, default=Size.image_tokens)
    parser.add_argument("--smoke", action="store_true", help="two narrow blocks, on a CPU too: does everything run?")
    parser.add_argument("--output", type=Path, help="also write the result there, as JSON")
    requested = parser.parse_args()
    if not torch.cuda.is_available() and not requested.smoke:
        parser.error("needs a CUDA GPU; --smoke runs two narrow blocks on this machine's CPU")
    size = Size(heads=2, ffn=512, image_tokens=64, text_tokens=16, blocks=2) if requested.smoke else Size()
    if not requested.smoke:
        size = Size(image_tokens=requested.image_tokens)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    names = [name for name in requested.only or WAYS if device.type == "cuda" or WAYS[name].attention is None]
    found: list[BenchRow] = []
    for row in rows(names, size, device, requested.samples):
        found.append(row)
        print_rows(out(), [row])
        if requested.output is not None:  # what was measured stays, whatever happens to the rest
            write_result(requested.output, result_of("block_variants", found, probe()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
