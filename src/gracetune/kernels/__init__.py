"""Triton kernels, and when they are used: in compiled graphs on GPUs.

Only a GPU's torch brings triton, so the modules here that need it are imported where they are called. `fused_products`
and `e4m3` need none.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Final

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


def pays_in_halves(x: Tensor) -> bool:
    """The same for kernels that compute halves."""
    return x.dtype in HALVES and pay(x)


def shared_bytes(device: torch.device) -> int:
    """How much of a processor's own memory a program may have; 0 where there is no GPU."""
    if device.type != "cuda":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack it
    return int(properties.shared_memory_per_block_optin)
