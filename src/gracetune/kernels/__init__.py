"""Triton kernels, and the choice of when they are used: in compiled graphs on GPUs.

triton is only installed with CUDA builds of torch. The modules that import it are therefore imported inside the
functions that use them. `fused_products` does not import it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

HAS_TRITON: Final = find_spec("triton") is not None
"""Whether triton is installed, which only torch's builds for GPUs do."""
HALF_DTYPES: Final = (torch.bfloat16, torch.float16)
E4M3: Final = torch.float8_e4m3fn
"""The 8-bit floating-point format of fp8 weights and activations."""
E4M3_MAX: Final = 448.0
"""The largest finite e4m3 value."""
E4M3_SMALLEST_ROW: Final = 2.0**-100
"""Rows whose largest absolute value is below this become zeros. `E4M3_MAX` divided by it is still finite in fp32."""


def use_kernels(x: Tensor) -> bool:
    """Whether our kernels should be used on `x`.

    Launching one from Python takes 50 us (on an H200's host); a compiled graph launches it far faster. Where graphs are
    compiled, everything triton needs on a machine is present too.
    """
    return x.device.type == "cuda" and HAS_TRITON and torch.compiler.is_compiling()


def use_half_kernels(x: Tensor) -> bool:
    """Like `use_kernels` (compiled graphs on GPUs), for kernels that only support half precision."""
    return x.dtype in HALF_DTYPES and use_kernels(x)


def shared_bytes(device: torch.device) -> int:
    """Shared memory per thread block, in bytes; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack it
    return int(properties.shared_memory_per_block_optin)
