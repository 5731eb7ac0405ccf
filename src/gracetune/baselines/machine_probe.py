"""Measurements beside the run: the speed of a fixed workload on this machine, and the log of nvidia-smi."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gracetune.baselines.baseline import SMI_LOG, Probe
from gracetune.config.environment import Environment

_ROUNDS, _WARM_UP = 20, 5
_SMI_FIELDS = "timestamp,index,name,utilization.gpu,memory.used,power.draw,temperature.gpu,clocks.sm"


def measure_probe(device: torch.device) -> Probe:
    """Time a matrix product and a copy, each `_ROUNDS` times. The work is the same on every device of one type."""
    found = _product_and_copy(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # leave the run the same free memory as without the probe
    return found


def _product_and_copy(device: torch.device) -> Probe:
    side, dtype, megabytes = (4096, torch.bfloat16, 256) if device.type == "cuda" else (512, torch.float32, 32)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(side, side, generator=generator).to(device, dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.zeros(megabytes << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    kind = str(dtype).removeprefix("torch.")
    return Probe(
        what=f"a {kind} matrix product of side {side} on {device.type}",
        gemm_ms=_milliseconds(lambda: torch.matmul(left, right, out=product), device),
        copy_ms=_milliseconds(lambda: target.copy_(source), device),
    )


def _milliseconds(work: Callable[[], object], device: torch.device) -> tuple[float, ...]:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(_WARM_UP + _ROUNDS):
        wait()
        began = time.perf_counter()
        work()
        wait()
        times.append(1000 * (time.perf_counter() - began))
    return tuple(times[_WARM_UP:])


def merge_probes(before: Probe, after: Probe) -> Probe:
    """One probe with the times from before and after the run."""
    return Probe(
        what=before.what,
        gemm_ms=(*before.gemm_ms, *after.gemm_ms),
        copy_ms=(*before.copy_ms, *after.copy_ms),
    )


class SmiLog:
    """Logs nvidia-smi to a file once per second, from `start` to `stop`. Without nvidia-smi it only gives a reason."""

    def __init__(self, folder: Path, environment: Environment) -> None:
        self._file = folder / SMI_LOG
        self._program = shutil.which("nvidia-smi", path=environment.get("PATH") or "")
        self._process: subprocess.Popen[bytes] | None = None
        self._reason = "no nvidia-smi on the PATH"

    def start(self) -> None:
        if self._program is None:
            return
        command = [self._program, f"--query-gpu={_SMI_FIELDS}", "--format=csv", "--loop=1"]
        try:
            with self._file.open("wb") as file:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
                )
        except OSError as error:
            self._reason = f"{self._program}: {error.strerror or error}"

    def stop(self) -> str:
        """Stop logging, and return the file's name or why there is none. Call once."""
        if self._process is not None:
            code = _end(self._process)
            self._process = None
            lines = self._file.read_text(errors="replace").strip().splitlines()
            if code <= 0 and lines:  # a negative code: ended by our signal
                return SMI_LOG
            self._reason = f"nvidia-smi ended with {code}: {lines[-1] if lines else 'without a word'}"
        self._file.unlink(missing_ok=True)
        return f"not available: {self._reason}"


def _end(process: subprocess.Popen[bytes]) -> int:
    process.terminate()
    try:
        return process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
