"""Start every Triton kernel of ours on CPU tensors, through the functions that a run calls.

With TRITON_INTERPRET=1, the interpreter of Triton computes the results, and plain torch computes them again. Without
it, each launch is compiled for a GPU of capability 9.0, with the types and constants of a real layer, and then dropped.
The last line says what ran. A kernel that nothing here starts is an error.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from gracetune import kernels
from gracetune.adapters.fast import products
from gracetune.kernels import fused_norm, fused_products, fused_rope, low_rank
from gracetune.models.eight_bit_linear import Fp8Linear
from gracetune.models.wan.blocks import FusedBlock, use_fused_blocks, use_pairwise_attention
from gracetune.optim.automagic_stack import CudaStack, Stack, UpdateRule
from gracetune.optim.element_rates import RateGrid, RateLimits

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter truncates to bf16 where a GPU rounds
SHARED_BYTES = 227 << 10
"""Shared memory of a thread block on a GPU of capability 9.0."""
EPS = 1e-6

Case = Callable[[], None]


class CompileOnly(DriverBase):  # type: ignore[misc]
    """A GPU of capability 9.0 to Triton. It compiles each launch and drops it."""

    def __init__(self) -> None:
        self.utils = self
        self.compiled: dict[str, set[str]] = {}

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing runs here")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, and the most threads of a block."""
        assert binary.startswith(b"\x7fELF"), name
        return 1, 1, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        self.compiled.setdefault(source.fn.__name__, set()).add(metadata.hash)
        return lambda *args: None


def noise(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(*shape).to(dtype)


def compare(found: Tensor, wanted: Tensor, tolerance: float = 4e-3) -> None:
    """Of what was compiled only, the memory was never written."""
    assert found.shape == wanted.shape
    if INTERPRETED:
        difference = (found.double() - wanted.double()).norm() / wanted.double().norm()
        assert difference <= tolerance, f"off by {difference:.2g} of the result's norm"


def both_ways(function: Callable[..., Any], x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    output = function(x)
    (to_x,) = torch.autograd.grad(output, x, gradient.to(output.dtype))
    return output.detach(), to_x


def small_or(real: int, small: int) -> int:
    return small if INTERPRETED else real


# -- norms and RoPE ---------------------------------------------------------------------------------------------------


def reference_norm_and_rope(x: Tensor, weight: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.float()
    if cos is None or sin is None:
        return scaled
    a, b = scaled.unflatten(2, (-1, cos.shape[-1] // 2, 2)).unbind(-1)
    c, s = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(2)


def norm_and_rope(width: int, head: int, *, weight_dtype: torch.dtype = HALF, tables: int = 1) -> Case:
    def case() -> None:
        x, gradient, weight = noise(3, 5, width), noise(3, 5, width), (1 + noise(width)).to(weight_dtype)
        angles = 3 * noise(tables, 5, 1, head, dtype=torch.float32)
        cos, sin = (angles.cos(), angles.sin()) if head else (None, None)
        found = both_ways(lambda x: fused_rope.norm_rope(x, weight, EPS, cos, sin), x, gradient)
        wanted = both_ways(lambda x: reference_norm_and_rope(x, weight, cos, sin), x.float(), gradient)
        for one, two in zip(found, wanted, strict=True):
            compare(one, two)

    return case


def add_and_norm(width: int, *, gated: bool) -> Case:
    """With a gate, the batch has one scale and shift, as in Wan's blocks."""

    def case() -> None:
        x, a, dh, dn = (noise(3, 5, width) for _ in range(4))
        gate = noise(3, width, dtype=torch.float32) if gated else None
        scale, shift = noise(2, 1 if gated else 3, width, dtype=torch.float32)

        def plain(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
            h = x + (a if gate is None else a * gate[:, None])
            return h, F.layer_norm(h, (width,), None, None, EPS) * scale[:, None] + shift[:, None]

        results = []
        for function, dtype in (
            (lambda x, a: fused_norm.add_norm(x, a, gate, scale, shift, EPS), HALF),
            (plain, torch.float32),
        ):
            given = [one.detach().to(dtype).requires_grad_() for one in (x, a)]
            answers = function(*given)
            results.append([*answers, *torch.autograd.grad(answers, given, [dh.to(dtype), dn.to(dtype)])])
        for one, two in zip(*results, strict=True):
            compare(one.detach(), two.detach())

    return case


def wan_block(*, heads: int, width: int) -> Case:
    """All of a block's kernels, called as a compiled block calls them."""

    def case() -> None:
        block = WanTransformerBlock(width, 2 * width, heads, cross_attn_norm=True).requires_grad_(False)
        for parameter in block.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        block.to(HALF)
        exact = WanTransformerBlock(width, 2 * width, heads, cross_attn_norm=True).requires_grad_(False)
        exact.load_state_dict(block.state_dict())
        use_fused_blocks(block)
        use_pairwise_attention(block)
        assert isinstance(block, FusedBlock)
        angles = noise(1, 5, 1, width // heads // 2, dtype=torch.float32).repeat_interleave(2, -1)
        rope = angles.cos(), angles.sin()
        text, temb = noise(2, 4, width), noise(2, 6, width, dtype=torch.float32)
        x, gradient = noise(2, 5, width), noise(2, 5, width)
        found = both_ways(lambda x: block(x, text, temb, rope), x, gradient)
        wanted = both_ways(lambda x: exact(x, text.float(), temb, rope), x.float(), gradient)
        for one, two in zip(found, wanted, strict=True):
            compare(one, two, 2e-2)

    return case


# -- adapters and 8-bit layers ----------------------------------------------------------------------------------------


def low_rank_adapters(inputs: int, outputs: int, rank: int, *, biased: bool) -> Case:
    """Two layers that share their input, with their frozen weights."""

    def case() -> None:
        layers = [
            products.LowRankFactors(
                noise(rank, inputs, dtype=torch.float32).requires_grad_(),
                noise(outputs, rank, dtype=torch.float32).requires_grad_(), 0.5, noise(outputs, inputs),
                noise(outputs) if biased else None,
            )
            for _ in range(2)
        ]  # fmt: skip
        x, gradients = noise(2, 19, inputs).requires_grad_(), [noise(2, 19, outputs) for _ in layers]

        def plain(layer: products.LowRankFactors) -> Tensor:
            assert layer.weight is not None
            bias = None if layer.bias is None else layer.bias.float()
            base = F.linear(x.float(), layer.weight.float(), bias)
            return base + 0.5 * F.linear(F.linear(x.float(), layer.down), layer.up)

        tensors = [x, *(one for layer in layers for one in (layer.down, layer.up))]
        found, wanted = products.low_rank_linears(x, layers), tuple(plain(layer) for layer in layers)
        back = torch.autograd.grad(found, tensors, gradients)
        exact = torch.autograd.grad(wanted, tensors, [one.float() for one in gradients])
        for one, two in zip((*found, *back), (*wanted, *exact), strict=True):
            compare(one.detach(), two.detach(), 1e-2)

    return case


def kronecker_adapter(a: int, b: int, c: int, d: int, *, biased: bool) -> Case:
    """LoKr on a frozen layer, [a b, c d]."""

    def case() -> None:
        base = nn.Linear(c * d, a * b, biased).requires_grad_(False).to(HALF)
        w1, w2 = (noise(*shape, dtype=torch.float32).requires_grad_() for shape in ((a, c), (b, d)))
        x, gradient = noise(2, 19, c * d).requires_grad_(), noise(2, 19, a * b)
        found = products.kronecker_linear(x, base, w1, w2, 0.5)
        bias = None if base.bias is None else base.bias.float()
        wanted = F.linear(x.float(), base.weight.float() + 0.5 * torch.kron(w1, w2), bias)
        back = torch.autograd.grad(found, (x, w1, w2), gradient)
        exact = torch.autograd.grad(wanted, (x, w1, w2), gradient.float())
        for one, two in zip((found, *back), (wanted, *exact), strict=True):
            compare(one.detach(), two.detach(), 1e-2)

    return case


def fp8_layer(inputs: int, outputs: int) -> Case:
    """Forward rounds x; backward rounds the gradient times the scales. The interpreter truncates to e4m3."""

    def case() -> None:
        layer = Fp8Linear(noise(outputs, inputs), None)
        x, gradient = noise(5, inputs), noise(5, outputs)
        found = both_ways(layer, x, gradient)
        with patch.object(kernels, "use_kernels", lambda x: False):
            wanted = both_ways(layer, x, gradient)
        for one, two in zip(found, wanted, strict=True):
            compare(one, two, 0.1)

    return case


def to_rank(inputs: int, rank: int) -> Case:
    """On a GPU with much shared memory: other tiles."""

    def case() -> None:
        rows, factor = noise(19, inputs), noise(rank, inputs).t()
        with patch.object(kernels, "shared_bytes", lambda device: SHARED_BYTES):
            found = low_rank.to_rank(rows, factor)
        compare(found, rows.float() @ factor.float())

    return case


# -- Automagic --------------------------------------------------------------------------------------------------------


def automagic(shape: tuple[int, ...], dtype: torch.dtype, decay: float = 0.0, limits: RateLimits | None = None) -> Case:
    def case() -> None:
        rule = UpdateRule(RateGrid.of(limits or RateLimits()), 0.999, 1e-30, 1.0, decay)
        ours = [noise(*shape, dtype=dtype).requires_grad_() for _ in range(3)]
        plain = [parameter.detach().clone().requires_grad_() for parameter in ours]
        stacks = [
            kind.of(parameters, ["a", "b", "c"], 1e-5, rule) for kind, parameters in ((CudaStack, ours), (Stack, plain))
        ]
        for step in range(5):
            active = [0, 2] if step == 2 else [0, 1, 2]
            for at in range(3):
                gradient = noise(*shape, dtype=dtype) if at in active else None
                ours[at].grad, plain[at].grad = gradient, gradient
            for stack in stacks:
                # The flag skips the step before the last, as for non-finite gradients.
                stack.step(active, rule, torch.tensor(float(step == 3)) if step else None)
        if not INTERPRETED:
            return
        for one, two in zip(stacks[0].entries().values(), stacks[1].entries().values(), strict=True):
            if one.is_floating_point():
                torch.testing.assert_close(one, two)
            else:
                assert torch.equal(one, two)
        for one, two in zip(ours, plain, strict=True):
            torch.testing.assert_close(one, two)

    return case


INTERPRETED_CASES = (
    norm_and_rope(512, 128),
    norm_and_rope(300, 100, weight_dtype=torch.float32, tables=3),
    norm_and_rope(512, 0),
    add_and_norm(512, gated=True),
    add_and_norm(300, gated=False),
    wan_block(heads=2, width=256),
    low_rank_adapters(300, 70, 4, biased=True),
    low_rank_adapters(128, 256, 16, biased=False),
    kronecker_adapter(16, 20, 16, 16, biased=True),
    kronecker_adapter(4, 30, 8, 17, biased=False),
    fp8_layer(96, 320),
    to_rank(600, 16),
    automagic((16, 50), torch.float32),
    automagic((300, 16), torch.float32, 0.1, RateLimits(1e-5, 1e-7, 2e-4)),
    automagic((4, 3, 3, 5), torch.float32),
    automagic((7, 130), torch.float16, 0.0, RateLimits(1e-3, 1e-4, 1e-1)),
    automagic((1, 9), torch.float32, 0.0, RateLimits(1e-9, 1e-10, 1e-3)),
)
COMPILED_CASES = (
    norm_and_rope(5120, 128),  # Wan 14B
    norm_and_rope(1536, 0, weight_dtype=torch.float32),  # Wan 1.3B; cross-attention
    norm_and_rope(3000, 100),
    add_and_norm(5120, gated=True),
    add_and_norm(5120, gated=False),
    add_and_norm(1000, gated=True),
    wan_block(heads=4, width=512),
    low_rank_adapters(5120, 5120, 16, biased=True),
    low_rank_adapters(3072, 1000, 64, biased=False),
    kronecker_adapter(16, 320, 16, 320, biased=True),
    fp8_layer(5120, 13824),
    to_rank(5120, 16),
    automagic((16, 5120), torch.float32),
    automagic((5120, 16), torch.bfloat16),
    automagic((320, 4, 3, 3), torch.float16),
)


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Every choice of a kernel falls as in a graph compiled for a GPU."""
    library = torch.library.Library("gracetune", "IMPL", "CPU")
    library.impl("mixed_and_product", fused_products._mixed_and_product)
    with ExitStack() as stack:
        for module, name in (
            (kernels, "use_kernels"), (products, "is_thin"), (products, "goes_to_rank"), (fused_products, "is_thin"),
        ):  # fmt: skip
            stack.enter_context(patch.object(module, name, lambda *given: True))
        yield


def kernel_functions() -> dict[str, Any]:
    """Every `triton.jit` function of `gracetune.kernels`."""
    found = {}
    for info in pkgutil.iter_modules(kernels.__path__, "gracetune.kernels."):
        module = importlib.import_module(info.name)
        found |= {name: one for name, one in vars(module).items() if isinstance(one, triton.JITFunction)}
    return found


def never_started(started: set[str]) -> list[str]:
    """Kernels that were not started and that no other kernel calls."""
    functions = kernel_functions()
    return sorted(
        name
        for name in functions.keys() - started
        if not any(f"{name}(" in other.src for key, other in functions.items() if key != name)
    )


def main() -> None:
    torch.manual_seed(0)
    compiling = CompileOnly()
    if not INTERPRETED:
        driver.set_active(compiling)
    cases = INTERPRETED_CASES if INTERPRETED else COMPILED_CASES
    with kernels_on_cpu():
        for case in cases:
            case()
    if INTERPRETED:
        print(f"{len(cases)} cases agree")
        return
    if missing := never_started(set(compiling.compiled)):
        raise SystemExit(f"no case starts {', '.join(missing)}")
    print(f"{sum(map(len, compiling.compiled.values()))} forms of {len(compiling.compiled)} kernels compile")


if __name__ == "__main__":
    main()
