"""The 8-bit floating-point format of fp8 weights and of what is multiplied with them."""

from __future__ import annotations

from typing import Final

import torch

E4M3: Final = torch.float8_e4m3fn
MOST: Final = 448.0
"""The largest number e4m3 has."""
SMALLEST: Final = 2.0**-100
"""Rows whose largest number is below this become zeros; its reciprocal times `MOST` is still finite in fp32."""
