from __future__ import annotations

import pytest
from diffusers.utils import logging

from unit.models import compiled_memory, meta_memory

# Building a model in bf16 from scratch earns a warning about layers that weights files keep in fp32.
logging.set_verbosity_error()


@pytest.fixture
def gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    meta_memory.use_gpu_kernels(monkeypatch)


@pytest.fixture
def opaque_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_memory.use_opaque_attention(monkeypatch)
