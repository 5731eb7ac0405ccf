"""A file with the measured link speeds of this machine, so that only the first run measures.

    <user's cache folder>/gracetune/link-speeds.json
    {"format": "gracetune-link-speeds", "version": 1,
     "machines": {"<GPU, driver, torch, profile>": {"seconds": .., "pinned_copy": .., ..}}}

The file is a cache. If it cannot be read or written, the next run measures again. It may be deleted at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import TypeAdapter, ValidationError

from gracetune.hardware.machine import Machine
from gracetune.memory.transport import MeasuredTransport
from gracetune.storage.atomic import write_file

FILE: Final = "link-speeds.json"


@dataclass(frozen=True)
class _Content:
    format: Literal["gracetune-link-speeds"]
    version: Literal[1]
    machines: dict[str, MeasuredTransport]


_CONTENT: Final = TypeAdapter(_Content)


def machine_key(machine: Machine, device: int) -> str:
    """A description of everything that the speeds depend on. If any of it changes, a run measures again."""
    gpu = next((gpu for gpu in machine.gpus if gpu.index == device), None)
    software, host = machine.software, machine.host
    parts = {
        "GPU": gpu.name if gpu else None,
        "PCI": gpu.pci_address if gpu else None,
        "driver": host.nvidia_kernel_driver,
        "CUDA": machine.driver.cuda_version,
        "torch": software.torch,
        "host": f"{host.cpu_model or host.architecture} {host.mem_total}",
        "profile": f"{machine.profile.value}, {machine.memory_mode.value}",
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def recall(folder: Path, key: str, *, with_managed: bool) -> MeasuredTransport | None:
    """The stored measurement; None if there is none or if it lacks a required measurement of managed memory."""
    found = _read(folder).get(key)
    return None if found is None or (with_managed and found.speeds.managed is None) else found


def remember(folder: Path, key: str, measured: MeasuredTransport) -> str | None:
    """Store a measurement. Returns the reason if that failed, else None."""
    content = _Content("gracetune-link-speeds", 1, {**_read(folder), key: measured})
    target = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(target, _CONTENT.dump_json(content, indent=1))
    except OSError as error:
        return f"{target}: {error.strerror}"
    return None


def _read(folder: Path) -> dict[str, MeasuredTransport]:
    try:
        return _CONTENT.validate_json((folder / FILE).read_bytes()).machines
    except (OSError, ValidationError):
        return {}
