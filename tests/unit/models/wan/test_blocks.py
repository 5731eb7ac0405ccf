"""The block with fused norms: diffusers' own code if the kernels do not apply, equal results if they do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from gracetune import kernels
from gracetune.models.wan.blocks import FusedBlock, gated, use_fused_blocks

WIDTH, HEADS, TOKENS = 48, 2, 12
BF16 = torch.bfloat16


def made(cross_attn_norm: bool = True) -> WanTransformerBlock:
    torch.manual_seed(0)
    block = WanTransformerBlock(WIDTH, 2 * WIDTH, HEADS, cross_attn_norm=cross_attn_norm)
    with torch.no_grad():
        for parameter in block.parameters():  # the norms' own would be 1 and 0
            parameter.add_(0.1 * torch.randn_like(parameter))
    return block


def fused(block: WanTransformerBlock) -> FusedBlock:
    holder = nn.ModuleList([deepcopy(block)])
    use_fused_blocks(holder)
    assert type(holder[0]) is FusedBlock
    return holder[0]


def results(block: nn.Module, dtype: torch.dtype, per_token: bool = False, checkpointed: bool = False) -> list[Tensor]:
    """The output, and the gradients of the input and of all trained parameters."""
    torch.manual_seed(1)
    x, text = torch.randn(2, TOKENS, WIDTH).to(dtype).requires_grad_(), torch.randn(2, 5, WIDTH).to(dtype)
    temb = torch.randn(2, TOKENS, 6, WIDTH) if per_token else torch.randn(2, 6, WIDTH)
    angles = torch.randn(1, TOKENS, 1, WIDTH // HEADS // 2).repeat_interleave(2, -1)
    given = (x, text, temb, (angles.cos(), angles.sin()))
    answer = checkpoint(block, *given, use_reentrant=False) if checkpointed else block(*given)
    trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
    gradient = torch.randn(answer.shape).to(dtype)
    return [answer.detach(), *torch.autograd.grad(answer, [x, *trained], gradient)]


@pytest.mark.parametrize("per_token", [False, True], ids=["batch", "token"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("cross_attn_norm", [False, True])
def test_cpu_result_equals_the_parents_bit_for_bit(cross_attn_norm: bool, dtype: torch.dtype, per_token: bool) -> None:
    block = made(cross_attn_norm).to(dtype)
    found, wanted = results(fused(block), dtype, per_token), results(block, dtype, per_token)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


def test_weights_keep_their_names_and_other_classes_their_own() -> None:
    class Other(WanTransformerBlock):  # type: ignore[misc]
        pass

    holder = nn.ModuleDict({"block": made(), "other": Other(WIDTH, WIDTH, HEADS)})
    before = list(holder.state_dict())
    use_fused_blocks(holder)
    assert (type(holder["block"]), type(holder["other"])) == (FusedBlock, Other)
    assert list(holder.state_dict()) == before


# -- when the kernels are used ----------------------------------------------------------------------------------------


def fits(
    block: FusedBlock, device: str = "cuda", dtype: torch.dtype = BF16, dimensions: int = 3, gradient: bool = False
) -> bool:  # fmt: skip
    with FakeTensorMode():
        x = torch.empty(2, TOKENS, WIDTH, dtype=dtype, device=device)
        temb = torch.empty(*(2, TOKENS, 6, WIDTH)[-dimensions:], device=device, requires_grad=gradient)
    return block._can_fuse(x, temb)


def test_when_the_kernels_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    block = fused(made().requires_grad_(False))
    assert fits(block)
    assert fits(block, dtype=torch.float16)
    assert not fits(block, dtype=torch.float32)
    assert not fits(block, device="cpu")
    assert not fits(block, dimensions=4)
    assert not fits(block, gradient=True)
    assert not fits(fused(made(cross_attn_norm=False).requires_grad_(False)))
    for trained in (block.scale_shift_table, block.norm2.weight, block.norm2.bias):
        trained.requires_grad_()
        assert not fits(block)
        trained.requires_grad_(False)
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    assert not fits(block)
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    assert not fits(block), "a launch from Python costs more than it saves"


def plain_norm() -> ModuleType:
    """Stands in for the kernels, which need a GPU."""

    def modulated_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert all(one.is_contiguous() and one.dtype == torch.float32 for one in (scale, shift))
        return x, (F.layer_norm(x.float(), x.shape[-1:], eps=eps) * scale[:, None] + shift[:, None]).type_as(x)

    def add_norm(
        x: Tensor, a: Tensor, gate: Tensor | None, scale: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        h = (x.float() + (a if gate is None else a * gate[:, None])).type_as(x)
        return modulated_norm(h, scale, shift, eps)

    plain = ModuleType("fused_norm")
    vars(plain).update(modulated_norm=modulated_norm, add_norm=add_norm)
    return plain


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_gated_gives_autograds_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x, a, gradient = (torch.randn(2, TOKENS, WIDTH).to(dtype) for _ in range(3))
    gate = torch.randn(2, WIDTH)

    def plainly(x: Tensor, a: Tensor, gate: Tensor) -> Tensor:
        return (x.float() + a.float() * gate[:, None]).to(x.dtype)

    def with_gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        given = [x.clone().requires_grad_(), a.clone().requires_grad_()]
        answer = function(*given, gate)
        return [answer.detach(), *torch.autograd.grad(answer, given, gradient)]

    for ours, theirs in zip(with_gradients(gated), with_gradients(plainly), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_fused_steps_equal_the_parents(monkeypatch: pytest.MonkeyPatch, checkpointed: bool) -> None:
    monkeypatch.setitem(sys.modules, "gracetune.kernels.fused_norm", plain_norm())
    monkeypatch.setattr(FusedBlock, "_can_fuse", lambda *_given: True)
    block = made().requires_grad_(False)
    for layer in (block.attn1.to_q, block.attn2.to_v, block.ffn.net[2]):
        layer.weight.requires_grad_()
    found = results(fused(block), torch.float32, checkpointed=checkpointed)
    torch.testing.assert_close(found, results(block, torch.float32), rtol=1e-4, atol=1e-5)
