"""Memory of this machine that belongs to no run: the page cache and other processes. Read at most every few seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from gracetune.hardware.host import parse_meminfo

_SECONDS = 10.0
"""Age at which the list of processes is read again."""
_MOST = 8
"""Processes that are shown."""
_SMALL = 64 << 20
"""Bytes below which a process is left out of the list for main memory."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SMI = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


class MachineMemory:
    """Thread-safe. A reading is shared by all pages that ask within a few seconds."""

    def __init__(self, meminfo: Path = Path("/proc/meminfo")) -> None:
        self._meminfo = meminfo
        self._mutex = threading.Lock()
        self._read_at = {"host": float("-inf"), "gpu": float("-inf")}
        self._processes: dict[str, list[dict[str, Any]]] = {"host": [], "gpu": []}

    def page_cache(self) -> int | None:
        """Bytes of main memory that the kernel gives back when programs need them."""
        found = self._read()
        if "Cached" not in found:
            return None
        names = ("Cached", "Buffers", "SReclaimable")
        return max(0, sum(found.get(name, 0) for name in names) - found.get("Shmem", 0))

    def available(self) -> int | None:
        return self._read().get("MemAvailable")

    def others(self, *, gpu: bool, but: int) -> list[dict[str, Any]]:
        """The largest processes other than process `but`: name, id and bytes."""
        kind = "gpu" if gpu else "host"
        with self._mutex:
            if time.monotonic() - self._read_at[kind] > _SECONDS:
                self._processes[kind] = _on_gpu() if gpu else _in_main_memory()
                self._read_at[kind] = time.monotonic()
            return [one for one in self._processes[kind] if one["pid"] != but][:_MOST]

    def _read(self) -> dict[str, int]:
        try:
            return parse_meminfo(self._meminfo.read_text())
        except OSError:
            return {}


def _in_main_memory() -> list[dict[str, Any]]:
    """One small file is read for each process: a machine of 72 cores has more than a thousand, most of the kernel."""
    found: list[tuple[int, int]] = []
    try:
        numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - as below
    except OSError:  # not Linux
        return []
    for number in numbers:
        try:
            with open(f"/proc/{number}/statm", "rb") as file:  # noqa: PTH123 - `Path` takes longer than the reading
                size = int(file.read().split()[1]) * _PAGE
        except (OSError, IndexError):  # it ended meanwhile
            continue
        if size >= _SMALL:
            found.append((size, number))
    largest = sorted(found, reverse=True)[: _MOST + 1]
    return [{"name": _name_of(number), "pid": number, "bytes": size} for size, number in largest]


def _on_gpu() -> list[dict[str, Any]]:
    """As nvidia-smi lists them. Empty where it is missing or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *_SMI], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found: list[dict[str, Any]] = []
    for line in done.stdout.splitlines():
        process, _, size = line.partition(",")
        if process.strip().isdigit() and size.strip().isdigit():
            number = int(process)
            found.append({"name": _name_of(number), "pid": number, "bytes": int(size) << 20})
    return sorted(found, key=lambda one: -one["bytes"])[: _MOST + 1]


def _name_of(process: int) -> str:
    try:
        return psutil.Process(process).name()
    except psutil.Error:
        return ""
