"""An expert that moves in behind the other's last backward pass, on a GPU with no room for both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gracetune.memory.experiment_tools import tidy
from gracetune.models.activation_parking import CudaClock
from gracetune.models.expert_streaming import StreamedParking
from gracetune.models.experts import ExpertHost

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
WIDTH, BLOCKS, ROWS = 4096, 16, 16384
ONE = 2 * WIDTH * WIDTH
"""Bytes of a block: 32 MiB."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False, device=CUDA, dtype=torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 16, bias=False, device=CUDA, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = torch.tanh(self.base(x)) * self.down(x).mean(-1, keepdim=True)
        return x + added


class Expert(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def test_turns_are_the_same_to_the_bit_within_one_experts_memory() -> None:
    host = ExpertHost(
        lambda module: StreamedParking.pinned(module, ["Block"], CUDA), "a test", room=lambda *, on_device,
        elsewhere: 0,
        clock=CudaClock(),
    )  # fmt: skip
    for seed, name in enumerate(("high", "low")):
        host.add(name, Expert(seed))
    plain = [Expert(seed) for seed in range(2)]
    x = torch.randn(ROWS, WIDTH, device=CUDA, dtype=torch.bfloat16)
    tidy(0)
    before = torch.cuda.memory_allocated()
    for turn in range(6):
        name, other = (("high", "low"), ("low", "high"))[turn % 2]
        expert = host.activate(name)
        with host.following(other):
            expert(x).backward()
        plain[turn % 2](x).backward()
        for ours, theirs in zip(expert.parameters(), plain[turn % 2].parameters(), strict=True):
            if theirs.grad is not None:
                assert ours.grad is not None
                assert torch.equal(ours.grad, theirs.grad)
        expert.zero_grad()
        plain[turn % 2].zero_grad()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before <= (BLOCKS + 2) * ONE
    assert host.switches.followed_bytes >= 5 * (BLOCKS - 2) * ONE
    host.activate("high")
    print(host.switches.line)
