"""Whether our own kernels can run: triton comes with torch's builds for GPUs, and with no other."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

HAS_TRITON: Final = find_spec("triton") is not None
