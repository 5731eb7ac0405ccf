"""The 8-bit floating-point format of fp8 weights and activations."""

from __future__ import annotations

from typing import Final

import torch

E4M3: Final = torch.float8_e4m3fn
MOST: Final = 448.0
"""The largest finite e4m3 value."""
SMALLEST: Final = 2.0**-100
"""Rows whose largest absolute value is below this become zeros. `MOST` divided by it is still finite in fp32."""
