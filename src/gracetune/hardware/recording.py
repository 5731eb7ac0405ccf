"""Recordings: the description of a machine as a folder, for tests with machines that are not available.

Format 1. A recording is a folder with
  recording.json   {"format": 1, "kind": "recorded" | "modelled", "architecture": ..., "page_size": ...}
  driver.json      the driver's answers (`driver.DriverFacts`)
  software.json    installed versions (`machine.Software`)
  SOURCE           the origin of the recording, for humans
  proc/ sys/ ...   the files that the probe reads, under their own paths
`record` writes the files that a probe of this machine actually read, reduced to the lines it uses, so that no host or
user names, serial numbers or paths are included. Control groups are renamed to level1, level2, ..., because their names
contain user, job and container ids. A file without a rule below causes an error and is not copied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ValidationError

from gracetune import __version__
from gracetune.config.path_status import inspect_path
from gracetune.errors import MachineError
from gracetune.hardware import cgroup, host
from gracetune.hardware.driver import CudaDriver, Driver, DriverFacts
from gracetune.hardware.files import HostFiles
from gracetune.hardware.host import ProcessFacts
from gracetune.hardware.machine import FrozenFacts, Machine, Software
from gracetune.hardware.probe import assemble
from gracetune.hardware.software import read_software
from gracetune.storage.atomic import new_folder, write_new


class MachineRecordingHeader(FrozenFacts):
    """`recording.json`."""

    format: Literal[1]
    kind: Literal["recorded", "modelled"]
    architecture: str | None
    page_size: int | None


def load_recording(folder: Path) -> Machine:
    """The Machine that a recording describes. Raises `MachineError` if the recording is invalid."""
    status = inspect_path(folder)
    if status.kind != "folder":
        found = {"nothing": "nothing", "file": "a file"}.get(status.kind, status.why)
        raise MachineError(f"{folder}: found {found}, expected a recording's folder. {_COMMAND}")
    folder = status.path
    header = _read_json(folder / "recording.json", MachineRecordingHeader)
    driver = _read_json(folder / "driver.json", DriverFacts)
    software = _read_json(folder / "software.json", Software)
    if inspect_path(folder / "proc").kind != "folder":
        raise MachineError(f"{folder}: the folder proc is missing, so this recording is not complete. {_COMMAND}")
    process = ProcessFacts(architecture=header.architecture, page_size=header.page_size)
    return assemble(HostFiles(folder), driver, process, software)


_COMMAND = "Make one with: gracetune doctor --record DIR"


_Model = TypeVar("_Model", bound=FrozenFacts)


def _read_json(path: Path, model: type[_Model]) -> _Model:
    try:
        return model.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise MachineError(f"{path}: {reason}; every recording has this file. {_COMMAND}") from error
    except UnicodeDecodeError as error:
        raise MachineError(f"{path}: not UTF-8 text, at byte {error.start}. {_COMMAND}") from error
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"]) or "the file"
        raise MachineError(f"{path}: {location}: {first['msg']}. {_COMMAND}") from error


def record(
    folder: Path,
    *,
    root: Path = Path("/"),
    driver: Driver | None = None,
    process: ProcessFacts | None = None,
    software: Software | None = None,
) -> Machine:
    """Write a recording of this machine and return its Machine. The folder must not exist or must be empty."""
    folder = _free_path(folder)
    files = _ObservedFiles(root)
    facts = (driver or CudaDriver()).facts(free_memory=True)
    process = process or ProcessFacts.of_this_process()
    software = software or read_software()
    assemble(files, facts, process, software)
    texts = _redact(files)
    header = MachineRecordingHeader(
        format=1, kind="recorded", architecture=process.architecture, page_size=process.page_size
    )
    texts |= {
        "recording.json": _pretty(header),
        "driver.json": _pretty(_redact_driver(facts)),
        "software.json": _pretty(software),
        "SOURCE": f"Recorded from a real machine by gracetune {__version__} (doctor --record).\n",
    }
    _write_folder(folder, texts)
    return load_recording(folder)


def _free_path(folder: Path) -> Path:
    """The path for the recording, after checking that it is free."""
    status = inspect_path(folder)
    if status.kind == "unreachable":
        raise MachineError(f"{folder}: cannot be accessed: {status.why}; choose another folder: --record NEW_DIR")
    occupied = status.kind == "file" or (status.kind == "folder" and HostFiles(status.path).names("/") != ())
    if occupied:
        raise MachineError(f"{folder}: exists and is not an empty folder; choose a new one: --record NEW_DIR")
    return status.path


def _pretty(model: FrozenFacts) -> str:
    return json.dumps(model.model_dump(mode="json"), indent=2) + "\n"


def _write_folder(folder: Path, texts: dict[str, str]) -> None:
    """Write the files atomically: in a temporary folder, which is renamed when complete."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(folder, files_synced=True) as scratch:
            for name, text in texts.items():
                path = scratch / name.lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                write_new(path, [text.encode()])
    except OSError as error:
        raise MachineError(f"{folder}: cannot be written: {error.strerror or error}; choose another folder") from error


class _ObservedFiles(HostFiles):
    """Records the files that the probe reads, so that a recording contains exactly what the probe needs."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.texts: dict[str, str] = {}

    def read(self, path: str) -> str | None:
        text = super().read(path)
        if text is not None:
            self.texts[path] = text
        return text


Rule = Callable[[str], str]


def _keep_all(text: str) -> str:
    return text


def _keep_nothing(text: str) -> str:
    """Keep only the fact that the file exists."""
    return text[:0]


def _keep_lines(pattern: str) -> Rule:
    wanted = re.compile(pattern)

    def keep(text: str) -> str:
        return "".join(f"{line}\n" for line in filter(wanted.match, text.splitlines()))

    return keep


def _keep_cpu_kinds(text: str) -> str:
    """Keep one entry per kind of core instead of one per core."""
    kinds = map(_keep_lines(r"(model name|CPU implementer|CPU part)\s*:"), text.split("\n\n"))
    return "\n".join(dict.fromkeys(kinds))


def _keep_nvidia_version(text: str) -> str:
    version = host.parse_nvidia_version(text)
    return f"NVRM version: NVIDIA kernel module  {version}\n" if version else ""


_RULES: tuple[tuple[str, Rule], ...] = (
    (re.escape(host.MEMINFO), _keep_lines(r"(MemTotal|MemFree|MemAvailable|SwapTotal|SwapFree):")),
    (re.escape(host.CPUINFO), _keep_cpu_kinds),
    (re.escape(host.STATUS), _keep_lines(r"Cpus_allowed_list:")),
    (re.escape(host.LIMITS), _keep_lines(r"Max locked memory ")),
    (re.escape(host.NVIDIA_PARAMS), _keep_lines(rf"({host.COHERENT_MODE}|{host.USER_NUMA}):")),
    (re.escape(host.NVIDIA_VERSION), _keep_nvidia_version),
    (re.escape(host.NVIDIA_MODULE_VERSION), _keep_all),
    (r"/proc/sys/kernel/(osrelease|numa_balancing)", _keep_all),
    (r"/sys/kernel/mm/transparent_hugepage/enabled", _keep_all),
    (rf"{host.NODES}/node[0-9]+/cpulist", _keep_all),
    (rf"{host.NODES}/node[0-9]+/meminfo", _keep_lines(r"Node +[0-9]+ +(MemTotal|MemFree|FilePages):")),
    (rf"{host.PCI_DEVICES}/[0-9a-f:.]+/(vendor|class|{'|'.join(host.LINK_FILES)})", _keep_all),
    (r"/\.dockerenv|/run/\.containerenv", _keep_nothing),
    (r".*/memory\.(max|high|current|limit_in_bytes|usage_in_bytes)", _keep_all),
    (r".*/memory\.stat", _keep_lines(r"(total_)?inactive_file ")),
)


def _redact(files: _ObservedFiles) -> dict[str, str]:
    location = cgroup.locate(files)
    texts: dict[str, str] = {}
    for path, text in files.texts.items():
        if path in (cgroup.MOUNTS, cgroup.MEMBERSHIP) or _is_foreign_pci_device(path, files):
            continue
        texts[_rename_groups(path, location)] = _rule(path)(text)
    if location is not None:
        texts |= _cgroup_files(location)
    # The probe distinguishes "no NVIDIA device" from "no PCI bus" by this folder, which needs a file to be recorded.
    if files.names(host.PCI_DEVICES) is not None:
        texts[f"{host.PCI_DEVICES}/.recorded"] = ""
    return texts


def _rule(path: str) -> Rule:
    for pattern, rule in _RULES:
        if re.fullmatch(pattern, path):
            return rule
    raise MachineError(f"no rule determines which lines of {path} may be recorded; please report this bug")


def _is_foreign_pci_device(path: str, files: _ObservedFiles) -> bool:
    """Whether a file describes a PCI device other than a GPU, such as a network card. Those are not recorded."""
    match = re.match(rf"({host.PCI_DEVICES}/[^/]+)/", path)
    return match is not None and not host.is_nvidia_vendor(files.texts.get(f"{match[1]}/vendor"))


def _canonical(location: cgroup.CgroupLocation) -> tuple[str, ...]:
    return tuple(f"level{depth}" for depth in range(1, len(location.groups) + 1))


_MOUNT_POINT = {1: "/sys/fs/cgroup/memory", 2: "/sys/fs/cgroup"}


def _rename_groups(path: str, location: cgroup.CgroupLocation | None) -> str:
    folder, _, name = path.rpartition("/")
    if location is None or not name.startswith("memory."):
        return path
    depth = len(location.groups) - location.folders().index(folder)
    return "/".join((_MOUNT_POINT[location.version], *_canonical(location)[:depth], name))


def _cgroup_files(location: cgroup.CgroupLocation) -> dict[str, str]:
    path, mount = "/" + "/".join(_canonical(location)), _MOUNT_POINT[location.version]
    if location.version == 1:
        return {
            cgroup.MEMBERSHIP: f"1:memory:{path}\n",
            cgroup.MOUNTS: f"1 0 0:1 / {mount} rw - cgroup cgroup rw,memory\n",
        }
    return {cgroup.MEMBERSHIP: f"0::{path}\n", cgroup.MOUNTS: f"1 0 0:1 / {mount} rw - cgroup2 cgroup2 rw\n"}


def _redact_driver(facts: DriverFacts) -> DriverFacts:
    """Remove folders from the loader's message, which may contain a home directory."""
    return facts.model_copy(update={"detail": re.sub(r"(/[^\s:/]+)+/", ".../", facts.detail)})
