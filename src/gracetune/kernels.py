"""Where our own kernels run: on GPUs, and where they gain more than their launch costs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor

HAS_TRITON: Final = find_spec("triton") is not None
"""It comes with torch's builds for GPUs, and with no other."""
HALVES: Final = (torch.bfloat16, torch.float16)
_LARGE: Final = 2**24
"""Elements. Python takes 50 us to launch a kernel of ours, on an H200's host; a compiled graph does it far faster."""


def pay(x: Tensor) -> bool:
    """Whether kernels that make one pass over `x` are worth their launch: in a compiled graph, or for large tensors."""
    return x.device.type == "cuda" and HAS_TRITON and (torch.compiler.is_compiling() or x.numel() >= _LARGE)
