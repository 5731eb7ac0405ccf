"""The energy counter and the clock of a GPU, read from NVIDIA's management library (NVML)."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_uint, c_ulonglong, c_void_p

import torch

LIBRARY = "libnvidia-ml.so.1"
_SM_CLOCK = 1
"""NVML_CLOCK_SM"""


class GpuPower:
    """Every reading is None where the driver or the GPU does not provide it."""

    def __init__(self, uuid: str, library: str = LIBRARY) -> None:
        """`uuid`: as `nvidia-smi -L` prints it, GPU-...."""
        self._handle = c_void_p()
        try:
            self._nvml: ctypes.CDLL | None = ctypes.CDLL(library)
        except OSError:
            self._nvml = None
            return
        found = self._nvml.nvmlInit_v2() == 0 and (
            self._nvml.nvmlDeviceGetHandleByUUID(c_char_p(uuid.encode()), byref(self._handle)) == 0
        )
        if not found:
            self._nvml = None

    @classmethod
    def of(cls, device: torch.device) -> GpuPower | None:
        """None for a device without NVML."""
        if device.type != "cuda":
            return None
        return cls(f"GPU-{torch.cuda.get_device_properties(device).uuid}")

    def joules(self) -> float | None:
        """Energy since the driver was loaded. Differences are used."""
        millijoules = c_ulonglong()
        if self._nvml is None or self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle, byref(millijoules)):
            return None
        return millijoules.value / 1000

    def clock_mhz(self) -> int | None:
        """The multiprocessors' clock at this moment."""
        clock = c_uint()
        if self._nvml is None or self._nvml.nvmlDeviceGetClockInfo(self._handle, _SM_CLOCK, byref(clock)):
            return None
        return clock.value
