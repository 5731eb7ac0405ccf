"""cuDNN's attention on tensors as a model has them: [B, tokens, heads, width], transposed and not copied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
        reason="`auto` takes cuDNN's kernel from Hopper on",
    ),
]


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (one.permute(0, 2, 1, 3) for one in (query, key, value))
    return scaled_dot_product_attention(q, k, v).permute(0, 2, 1, 3)


@pytest.mark.parametrize("captions", [512, 1024], ids=["cross", "self"])
@pytest.mark.parametrize("compiled", [False, True])
def test_it_takes_them_turned_and_answers_the_same_way(captions: int, compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    lengths = (1024, captions, captions)
    given = [torch.randn(2, length, 8, 128, device="cuda", dtype=torch.bfloat16) for length in lengths]
    gradient = torch.randn_like(given[0])
    found = []
    for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
        leaves = [one.clone().requires_grad_() for one in given]
        run = torch.compile(attended, fullgraph=True) if compiled else attended
        with sdpa_kernel(kernel):
            answer = run(*leaves)
            answer.backward(gradient)
        if kernel == SDPBackend.CUDNN_ATTENTION:
            assert answer.is_contiguous(), "so heads and width are one side without a copy"
        found.append([answer.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 2e-2
