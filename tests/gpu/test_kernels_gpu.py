"""Our own kernels, on sizes as real layers have them and on odd ones, against plain torch in fp32.

They are imported where they are used: a machine without a GPU has no triton, and collects these tests all the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from gracetune.adapters.computation import Computation
from gracetune.adapters.fast.products import kronecker
from gracetune.bench.step.job import PRESETS, AdapterKind, StepJob
from gracetune.bench.step.numerics import gradient_check
from gracetune.bench.step.random_model import make_model
from gracetune.models.common.gelu import SigmoidGelu, gelu_by_sigmoid, use_sigmoid
from gracetune.models.eight_bit_linear import quantize_rows
from gracetune.models.footprint import FP8_CAPABILITY
from gracetune.models.wan.blocks import FusedBlock, use_fused_blocks

pytestmark = pytest.mark.gpu
compiled_or_not = pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
EPS = 1e-6
ROUNDING = 4e-3
"""Of a result in bf16, as a part of its norm."""
Function = Callable[..., Any]


def run_as(function: Function, compiled: bool) -> Function:
    torch._dynamo.reset()  # each shape its own graph: torch makes few for one function, and then stops

    def called(*given: Any) -> Any:  # an op is no function the compiler could start from
        return function(*given)

    return torch.compile(called, fullgraph=True) if compiled else called


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def both_ways(function: Function, gradient: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    answer = function(x, *others)
    (to_x,) = torch.autograd.grad(answer, x, gradient.to(answer.dtype))
    return answer.detach(), to_x


# -- fused norm and RoPE ----------------------------------------------------------------------------------------------


def plainly_rotated(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    modulated_norm = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    a, b = modulated_norm.unflatten(2, (-1, cos.shape[-1] // 2, 2)).unbind(-1)
    c, s = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(2)


def tables(tokens: int, head: int, samples: int = 1) -> tuple[Tensor, Tensor]:
    """With another angle in the places that are not to be read."""
    angles = 3 * noise(samples, tokens, 1, head, dtype=torch.float32)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("batch", "tokens", "width", "head", "compiled"),
    [
        (2, 4096, 5120, 128, False), (2, 4096, 5120, 128, True), (3, 77, 1536, 128, False), (1, 1, 5120, 128, False),
        (2, 33, 96, 16, False), (1, 7, 3000, 100, False),
    ],
)  # fmt: skip
def test_normed_and_turned(
    batch: int, tokens: int, width: int, head: int, weight_dtype: torch.dtype, compiled: bool
) -> None:  # fmt: skip
    from gracetune.kernels.fused_rope import norm_rope

    x, gradient = 2 * noise(batch, tokens, width), noise(batch, tokens, width)
    others = ((1 + noise(width)).to(weight_dtype), EPS, *tables(tokens, head))
    found = both_ways(run_as(norm_rope, compiled), gradient, x, *others)
    wanted = both_ways(plainly_rotated, gradient, x.float(), *others)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        assert error(ours, theirs) <= ROUNDING


@compiled_or_not
def test_normed_and_turned_with_positions_of_each_samples_own(compiled: bool) -> None:
    """As routed tokens have them."""
    from gracetune.kernels.fused_rope import norm_rope

    x, gradient = 2 * noise(3, 77, 1536), noise(3, 77, 1536)
    others = (1 + noise(1536), EPS, *tables(77, 128, samples=3))
    found = both_ways(run_as(norm_rope, compiled), gradient, x, *others)
    wanted = both_ways(plainly_rotated, gradient, x.float(), *others)
    assert max(error(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)) <= ROUNDING


@compiled_or_not
def test_normed_and_turned_among_other_work_and_by_columns(compiled: bool) -> None:
    """Neither x nor the gradient is by rows in memory, and neither is given by a caller."""
    from gracetune.kernels.fused_rope import norm_rope

    tokens, width = 512, 5120
    others = (1 + noise(width), EPS, *tables(tokens, 128))

    def ours(x: Tensor, *others: Any) -> Tensor:
        return norm_rope((x + 1).transpose(1, 2), *others).transpose(1, 2) * 0.5

    def plain(x: Tensor, *others: Any) -> Tensor:
        return plainly_rotated((x + 1).transpose(1, 2), *others).transpose(1, 2) * 0.5

    x, gradient = noise(2, width, tokens), noise(2, width, tokens)
    found = both_ways(run_as(ours, compiled), gradient, x, *others)
    wanted = both_ways(plain, gradient, x.float(), *others)
    assert max(error(one, two) for one, two in zip(found, wanted, strict=True)) <= 2 * ROUNDING  # rounded twice


# -- rows in e4m3 -----------------------------------------------------------------------------------------------------


def apart(one: Tensor, two: Tensor) -> Tensor:
    """How many steps of e4m3 lie between them."""

    def place(values: Tensor) -> Tensor:
        bits = values.view(torch.uint8).int()
        return torch.where(bits < 128, bits, 128 - bits)

    return (place(one) - place(two)).abs()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < FP8_CAPABILITY, reason="no e4m3 in its kernels"
)
@pytest.mark.parametrize("with_columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(
    ("n", "k", "dtype", "compiled"),
    [
        (4096, 5120, torch.bfloat16, False), (4096, 5120, torch.bfloat16, True), (2048, 13824, torch.bfloat16, False),
        (33, 1536, torch.float32, False), (7, 100, torch.float32, False), (1, 17, torch.bfloat16, False),
        (9, 20000, torch.bfloat16, False),
    ],
)  # fmt: skip
def test_rows_are_rounded_as_in_plain_torch(
    n: int, k: int, dtype: torch.dtype, with_columns: bool, compiled: bool
) -> None:  # fmt: skip
    from gracetune.kernels.fp8_rows import rounded_rows

    x = (noise(n, k) * 10 ** noise(n, 1, dtype=torch.float32)).to(dtype)
    if n >= 7:
        x[1], x[2] = 0, x[2] * 1e-38
        x[3, k // 2], x[4, 0], x[5, -1] = float("nan"), float("inf"), -float("inf")
    columns = torch.rand(1, k, device="cuda") + 0.01 if with_columns else None
    values, scales = run_as(rounded_rows, compiled)(x, columns)
    wanted, wanted_scales = quantize_rows(x if columns is None else x.float() * columns)
    assert (values.dtype, scales.dtype) == (wanted.dtype, wanted_scales.dtype)
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-6, atol=0, equal_nan=True)
    missing = wanted.float().isnan()
    assert torch.equal(values.float().isnan(), missing)
    steps = apart(values, wanted)[~missing]
    assert steps.max() <= 1
    assert (steps > 0).double().mean() < 1e-3


# -- LoKr's small factor ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(
    ("p", "q", "n", "k", "compiled"),
    [
        (16, 16, 8192, 320, False), (16, 16, 8192, 320, True), (8, 4, 37, 30, False), (64, 32, 65, 48, False),
        (4, 16, 1, 17, False),
    ],
)  # fmt: skip
def test_mixed(p: int, q: int, n: int, k: int, by_columns: bool, compiled: bool) -> None:
    from gracetune.kernels.lokr_mixing import mixed

    small = noise(q, p).t() if by_columns else noise(p, q)
    rows = noise(n, q, k)
    found = run_as(mixed, compiled)(small, rows)
    assert found.dtype == torch.bfloat16
    assert error(found, torch.einsum("pq,nqk->npk", small.double(), rows.double())) <= ROUNDING


@compiled_or_not
@pytest.mark.parametrize("w1_first", [False, True])
def test_both_passes_of_kronecker_on_it(w1_first: bool, compiled: bool) -> None:
    x, gradient = noise(1024, 5120), noise(1024, 13824)
    w1, w2 = (noise(16, 16, dtype=torch.float32), noise(864, 320, dtype=torch.float32))
    mode = Computation("kronecker", "", w1_first=w1_first)

    def ours(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return kronecker(x, w1, w2, 1.0, mode)

    def plain(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return x @ torch.kron(w1.bfloat16().double(), w2.bfloat16().double()).t()

    found = both_ways(run_as(ours, compiled), gradient, x, w1, w2)
    wanted = both_ways(plain, gradient, x.double(), w1, w2)
    assert max(error(one, two) for one, two in zip(found, wanted, strict=True)) <= 2 * ROUNDING  # rounded in between


# -- fused add and norm ------------------------------------------------------------------------------------------------

norms = pytest.mark.parametrize(("batch", "tokens", "width"), [(2, 2048, 5120), (3, 77, 1536)])


def plain_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    away = x - x.mean(-1, keepdim=True)
    return away * torch.rsqrt(away.square().mean(-1, keepdim=True) + eps) * scale[:, None] + shift[:, None]


def plainly_added(
    x: Tensor, a: Tensor, gate: Tensor | None, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h = x + (a if gate is None else a * gate[:, None])
    return h, plain_norm(h, scale, shift, eps)


@compiled_or_not
@pytest.mark.parametrize("with_gate", [False, True], ids=["plain", "gate"])
@norms
def test_added_and_normed(batch: int, tokens: int, width: int, with_gate: bool, compiled: bool) -> None:
    """With a gate the norm has weights that the batch shares, as in the block."""
    from gracetune.kernels.fused_norm import add_norm

    gate = noise(batch, width, dtype=torch.float32) if with_gate else None
    scale, shift = noise(2, 1 if with_gate else batch, width, dtype=torch.float32)
    x, a = 2 * noise(batch, tokens, width), noise(batch, tokens, width)
    gradients = noise(batch, tokens, width), noise(batch, tokens, width)

    def results(function: Function, dtype: torch.dtype) -> list[Tensor]:
        given = [one.to(dtype).detach().requires_grad_() for one in (x, a)]
        answers = function(*given, gate, 1 + scale, shift, EPS)
        back = torch.autograd.grad(answers, given, [one.to(dtype) for one in gradients])
        return [*(answer.detach() for answer in answers), *back]

    found, wanted = results(run_as(add_norm, compiled), x.dtype), results(plainly_added, torch.float32)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        assert error(ours, theirs) <= ROUNDING


@norms
def test_normed(batch: int, tokens: int, width: int) -> None:
    from gracetune.kernels.fused_norm import modulated_norm

    scale, shift = noise(2, batch, width, dtype=torch.float32)
    x, gradient = 2 * noise(batch, tokens, width), noise(batch, tokens, width)
    found = both_ways(
        run_as(lambda *given: modulated_norm(*given)[1], width == 5120), gradient, x, 1 + scale, shift, EPS
    )
    wanted = both_ways(plain_norm, gradient, x.float(), 1 + scale, shift, EPS)
    assert max(error(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)) <= ROUNDING


def block_and_input() -> tuple[nn.Module, list[Tensor], tuple[Tensor, Tensor]]:
    """In bf16, with its layers' weights trained; and x, the text and the modulation, and the angles."""
    torch.manual_seed(0)
    width, heads, tokens = 512, 4, 300
    block = WanTransformerBlock(width, 2 * width, heads, cross_attn_norm=True).requires_grad_(False)
    for parameter in block.parameters():  # the norms' own would be 1 and 0
        parameter.add_(0.02 * torch.randn_like(parameter))
    block.to("cuda", torch.bfloat16)
    for layer in (block.attn1.to_v, block.attn1.to_out[0], block.attn2.to_v, block.attn2.to_out[0], block.ffn.net[2]):
        layer.weight.requires_grad_()
    angles = noise(1, tokens, 1, width // heads // 2, dtype=torch.float32).repeat_interleave(2, -1)
    given = [noise(2, tokens, width), noise(2, 16, width), noise(2, 6, width, dtype=torch.float32)]
    return block, given, (angles.cos(), angles.sin())


def test_a_compiled_block_on_it_is_as_near_the_exact_one_as_diffusers() -> None:
    block, (x, text, temb), rope = block_and_input()
    gradient, ours = noise(*x.shape), deepcopy(block)
    use_fused_blocks(ours)
    use_sigmoid(ours)
    assert isinstance(ours, FusedBlock)
    assert isinstance(ours.ffn.net[0], SigmoidGelu)

    def results(function: Function, block: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        given = x.to(dtype).requires_grad_()
        answer = function(given, text.to(dtype), temb, rope)
        trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
        return [answer.detach(), *torch.autograd.grad(answer, [given, *trained], gradient.to(dtype))]

    exact_block = deepcopy(block).float()
    exact = results(exact_block, exact_block, torch.float32)
    theirs = results(block, block, x.dtype)
    found, codes = run_and_get_code(results, run_as(ours, True), ours, x.dtype)
    code = "".join(codes)
    for kernel in ("_add_and_norm(?!_backward)", "_add_and_norm_backward", "sigmoid"):
        assert re.search(kernel, code), kernel
    for one, two, wanted in zip(found, theirs, exact, strict=True):
        assert error(one, wanted) <= min(2e-2, 1.2 * error(two, wanted))


# -- GELU -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(4096, 13824), (3, 17)])
def test_a_compiled_gelu_by_sigmoid_is_as_near_the_exact_one_as_torchs(size: tuple[int, int]) -> None:
    x, gradient = 3 * noise(*size), noise(*size)

    def by_tanh(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    exact = both_ways(by_tanh, gradient.double(), x.double())
    theirs = both_ways(by_tanh, gradient, x)
    found = both_ways(run_as(gelu_by_sigmoid, True), gradient, x)
    for one, two, wanted in zip(found, theirs, exact, strict=True):
        assert error(one, wanted) <= 1.01 * error(two, wanted) + 1e-4


# -- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.full  # each compiles for a quarter to three quarters of a minute
@pytest.mark.parametrize(
    ("bench", "adapter"),
    [("wan14b", "lora"), ("wan14b", "lokr"), ("flux", "lora"), ("qwen", "lora"), ("sdxl", "lora")],
)
def test_a_small_models_gradients_in_compiled_blocks_are_near_exact_ones(
    bench: str, adapter: AdapterKind, tmp_path: Path
) -> None:
    torch._dynamo.reset()
    model = make_model(PRESETS[bench], tmp_path / bench, "small")
    found = gradient_check(StepJob(bench, adapter), model, torch.device("cuda", 0))
    assert found.compiled
    assert found.relative_error <= min(5e-2, max(1e-2, 1.1 * found.library_relative_error))
