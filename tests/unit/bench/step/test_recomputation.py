"""What the compiler repeats of a forward pass, counted where it cuts the graph."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_function

from gracetune.bench.step.recomputation import Repeated

SIDE = 8


def chain(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Two products; the gradients need what lies between them."""
    return (x.mm(first).sigmoid().mm(second).sigmoid()).sum()


def inputs() -> list[Tensor]:
    return [torch.randn(SIDE, SIDE).requires_grad_(number > 0) for number in range(3)]


@pytest.mark.parametrize(("budget", "share"), [(1.0, 0.0), (0.0, 1.0)])
def test_what_a_budget_makes_it_repeat(budget: float, share: float) -> None:
    repeated = Repeated()

    def cut(joint: Any, given: Any, **settings: Any) -> Any:
        return repeated(joint, given, compiler="inductor", **settings)

    assert repeated.share is None
    keep = lambda graph, _inputs: graph  # noqa: E731
    with functorch_config.patch(activation_memory_budget=budget):
        aot_function(chain, fw_compiler=keep, bw_compiler=keep, partition_fn=cut)(*inputs())
    assert repeated.share == share


COMPILED = """
import torch
from torch._functorch import config
from gracetune.bench.step.recomputation import counting

def chain(x, first, second):
    return (x.mm(first).sigmoid().mm(second).sigmoid()).sum()

given = [torch.randn(8, 8).requires_grad_(number > 0) for number in range(3)]
with counting() as repeated, config.patch(activation_memory_budget=0.0):
    found = torch.compile(chain)(*given)
    found.backward()
torch.testing.assert_close(found, chain(*given))
print(repeated.share)
"""


@pytest.mark.full
def test_the_compiler_asks_for_it() -> None:
    """In a process of its own: setuptools, which inductor imports, rejects one that has imported distutils before."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},  # a graph found again is not cut again
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 1
