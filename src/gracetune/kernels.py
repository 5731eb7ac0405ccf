"""Where our own kernels run: in compiled graphs on GPUs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor

HAS_TRITON: Final = find_spec("triton") is not None
"""It comes with torch's builds for GPUs, and with no other."""
HALVES: Final = (torch.bfloat16, torch.float16)


def pay(x: Tensor) -> bool:
    """Whether our kernels are to be used on `x`.

    Python takes 50 us to launch one (on an H200's host), a compiled graph far less; and where graphs are compiled, what
    triton needs on a machine is there.
    """
    return x.device.type == "cuda" and HAS_TRITON and torch.compiler.is_compiling()
