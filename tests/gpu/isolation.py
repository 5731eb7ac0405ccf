"""What a GPU test has to leave as it found it, and how it is put back.

torch keeps a lot for a whole process: the memory fraction, deterministic algorithms, compiled code, cuBLAS workspaces,
random generators. A test that changes one of them makes another test fail, in some orders only. So everything here is
compared after each test, put back, and the test that changed it is the one that fails.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from gracetune.memory.native import Unavailable, load
from gracetune.memory.native.binding import LIBRARY
from gracetune.units import MIB, format_bytes

TOLERANCE: Final = MIB
"""Device memory a test may leave allocated: generators that took part in a CUDA graph keep a few hundred bytes."""

POOL_TOLERANCE: Final = 256 * MIB
"""Device memory that torch's pools may keep although nothing, or nearly nothing, is allocated from them."""

Setting = tuple[Callable[[], Any], Callable[[Any], object]]


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_sdp(value: tuple[bool, bool, bool, bool]) -> None:
    cuda = torch.backends.cuda
    for enable, on in zip(
        (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp, cuda.enable_cudnn_sdp), value,
        strict=True,
    ):  # fmt: skip
        enable(on)


SETTINGS: Final[Mapping[str, Setting]] = MappingProxyType(
    {
        "per-process memory fraction": (
            lambda: torch.cuda.get_per_process_memory_fraction(0),
            lambda value: torch.cuda.set_per_process_memory_fraction(value, 0),
        ),
        "sync debug mode": (torch.cuda.get_sync_debug_mode, torch.cuda.set_sync_debug_mode),
        "current stream": (torch.cuda.current_stream, torch.cuda.set_stream),
        "current device": (torch.cuda.current_device, torch.cuda.set_device),
        "deterministic algorithms": (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            _set_deterministic,
        ),
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "gradients enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
        "autocast on cuda": (
            lambda: torch.is_autocast_enabled("cuda"), lambda value: torch.set_autocast_enabled("cuda", value)
        ),
        "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "cuDNN benchmark": (
            lambda: torch.backends.cudnn.benchmark, lambda value: setattr(torch.backends.cudnn, "benchmark", value)
        ),
        "cuDNN deterministic": (
            lambda: torch.backends.cudnn.deterministic,
            lambda value: setattr(torch.backends.cudnn, "deterministic", value),
        ),
        "attention kernels": (
            lambda: (
                torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(),
                torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled(),
            ),
            _set_sdp,
        ),
        "CPU threads": (torch.get_num_threads, torch.set_num_threads),
    }
)  # fmt: skip


class _ClearWorkspaces(torch.autograd.Function):
    """Clears the cuBLAS workspaces of autograd's own thread: torch keeps them by thread, and that one never ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        torch._C._cuda_clearCublasWorkspaces()
        return gradients[0]


def clear_workspaces() -> None:
    """32 MiB for each thread and stream that multiplied matrices on a Hopper GPU."""
    torch._C._cuda_clearCublasWorkspaces()
    with torch.enable_grad(), torch.inference_mode(mode=False):
        x = torch.zeros((), device="cuda:0", requires_grad=True)
        answer: Tensor = _ClearWorkspaces.apply(x)  # type: ignore[no-untyped-call]
        answer.backward()


def held_bytes() -> int:
    """Device memory that tensors still hold. Garbage is collected only where there may be some: that takes long."""
    torch.cuda.synchronize()
    clear_workspaces()
    torch.clear_autocast_cache()
    if torch.cuda.memory_allocated() > TOLERANCE:
        gc.collect()
        torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def managed_bytes() -> int:
    """Managed memory that is not free yet, without that of objects which only refer to each other."""
    loaded = load() if LIBRARY.is_file() else None
    if loaded is None or isinstance(loaded, Unavailable):
        return 0
    if loaded.total_stats().live_bytes > 0:
        gc.collect()
    return loaded.total_stats().live_bytes


def _clear_position_tables() -> None:
    """diffusers keeps Qwen-Image's position tables, on the device, in `lru_cache`s of its class."""
    module = sys.modules.get("diffusers.models.transformers.transformer_qwenimage")
    classes = [one for one in vars(module).values() if isinstance(one, type)] if module is not None else []
    for method in (one for cls in classes for one in vars(cls).values()):
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


def drop_caches() -> None:
    """Whatever torch keeps for later, compiled code included: the next test begins without it."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    _clear_position_tables()
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)  # pytest keeps a failed test's frames here, with all their tensors
    held_bytes()
    torch.cuda.empty_cache()


def seed_everything() -> None:
    random.seed(0)
    torch.manual_seed(0)


@dataclass(frozen=True)
class State:
    settings: Mapping[str, Any]
    held: int
    reserved: int
    managed: int

    @classmethod
    def now(cls) -> State:
        settings = {name: read() for name, (read, _) in SETTINGS.items()}
        return cls(settings, held_bytes(), torch.cuda.memory_reserved(), managed_bytes())

    def restore(self) -> list[str]:
        """Put every setting back; what had been changed, in words."""
        changed = []
        for name, (read, write) in SETTINGS.items():
            found, before = read(), self.settings[name]
            if found != before:
                changed.append(f"{name}: {before} before, {found} after")
                write(before)
        return changed

    def left_behind(self) -> list[str]:
        """Memory that is still held; call it when nothing of the test is alive any more."""
        found = []
        if (left := held_bytes() - self.held) > TOLERANCE:
            found.append(f"{format_bytes(left)} of device memory still allocated: {_largest()}")
        torch.cuda.empty_cache()
        if not found and (left := torch.cuda.memory_reserved() - self.reserved) > POOL_TOLERANCE:
            found.append(f"{format_bytes(left)} of device memory kept by a pool, of a CUDA graph or a MemPool")
        if (left := managed_bytes() - self.managed) > 0:
            found.append(f"{format_bytes(left)} of managed memory still allocated")
        return found


def _largest() -> str:
    """The tensors that hold the most; what no tensor holds is a library's or a CUDA graph's."""
    tensors = [one for one in gc.get_objects() if isinstance(one, Tensor) and one.device.type == "cuda"]
    tensors.sort(key=lambda one: one.nbytes, reverse=True)
    shown = [f"{tuple(one.shape)} {one.dtype} {format_bytes(one.nbytes)}" for one in tensors[:4]]
    return ", ".join(shown) or "no tensor that Python knows of"


def why_unusable() -> str | None:
    """Why this process cannot go on using CUDA; None where it can."""
    try:
        torch.cuda.synchronize()
        torch.rand(1, device="cuda:0").add_(1)
        torch.cuda.synchronize()
    except RuntimeError as error:  # a sticky CUDA error, or a capture that was begun and never ended
        return str(error).strip().splitlines()[0]
    return None
