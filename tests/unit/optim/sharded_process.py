"""One of two processes that train a model with Automagic, once sharded by FSDP2 and once whole."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gracetune.config.run_config import Optimizer as Requested
from gracetune.optim.automagic import Automagic
from gracetune.optim.build import build_optimizer, load_named_state, named_state, parameter_names
from gracetune.optim.record import ParamGroup


class Model(nn.Module):
    """Odd numbers of rows, a single row (one process has an empty shard), vectors, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 1)
        self.conv = nn.Conv2d(1, 3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = self.conv(x.reshape(-1, 1, 2, 3)).mean()
        return self.second(torch.tanh(self.first(x))).square().mean() + images.square()


def optimizer_of(model: nn.Module, name: str) -> tuple[torch.optim.Optimizer, dict[str, torch.Tensor]]:
    groups = [ParamGroup("", "", dict(model.named_parameters()))]
    name, _, rates = name.partition(" ")
    config: dict[str, Any] = {"name": name, "lr": 1e-3, "weight_decay": 0.01}
    if name == "automagic":
        config["limits"] = {"lr_bump": 1e-4, "max_lr": 1e-1}
    if rates:
        config["options"] = {"rates": rates}
    return build_optimizer(Requested.model_validate(config), groups), parameter_names(groups)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=draw)).backward()
        optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(name: str) -> None:
    torch.manual_seed(0)
    plain = Model()
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    optimizers = [optimizer_of(model, name) for model in (plain, sharded)]
    for model, (optimizer, _) in zip((plain, sharded), optimizers, strict=True):
        train(model, optimizer, range(6))
    for one, two in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(whole(two), one, rtol=1e-5, atol=1e-6)
    states = [named_state(optimizer, names) for optimizer, names in optimizers]
    assert states[0].tensors.keys() == states[1].tensors.keys()
    for key, tensor in states[0].tensors.items():
        torch.testing.assert_close(states[1].tensors[key], tensor, rtol=1e-4, atol=1e-6, msg=key)

    # A resumed sharded run gives the same bits as an uninterrupted one.
    again = copy.deepcopy(plain)
    with torch.no_grad():
        for one, two in zip(again.parameters(), sharded.parameters(), strict=True):
            one.copy_(whole(two))
    fully_shard(again, mesh=init_device_mesh("cpu", (2,)))
    resumed, names = optimizer_of(again, name)
    load_named_state(resumed, names, states[1])
    for model, optimizer in ((sharded, optimizers[1][0]), (again, resumed)):
        train(model, optimizer, range(6, 10))
    for one, two in zip(sharded.parameters(), again.parameters(), strict=True):
        assert torch.equal(whole(one), whole(two))
    if isinstance(resumed, Automagic):
        assert all(stack.sharding is not None for _group, _rule, stack in resumed._stacks)


def run(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        for name in ("automagic", "automagic upstream", "adamw", "lion"):
            check(name)
        dist.barrier()
    finally:
        time.sleep(0.05)  # as `Runtime.close` does: gloo's threads release their last work shortly after it is done
        dist.destroy_process_group()
