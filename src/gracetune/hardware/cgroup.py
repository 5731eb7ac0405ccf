"""The memory limit of this process's control group, for cgroup versions 1 and 2.

Limits of all groups from this process's group up to the root apply, so all of them are read and the lowest counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from gracetune.hardware.files import HostFiles, parse_fields, parse_integer
from gracetune.hardware.machine import Cgroup

MOUNTS = "/proc/self/mountinfo"
MEMBERSHIP = "/proc/self/cgroup"

# Version 1 reports "unlimited" as the largest page count in bytes, just under 2**63.
_V1_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class CgroupLocation:
    """The location of the memory controller's files for this process."""

    version: Literal[1, 2]
    mount_point: str
    groups: tuple[str, ...]
    """Folder names below the mount point, outermost first."""

    def folders(self) -> list[str]:
        """Absolute paths of all folders, from the process's group up to the root."""
        base = self.mount_point.rstrip("/")
        return ["/".join((base, *self.groups[:depth])) for depth in range(len(self.groups), -1, -1)]


@dataclass(frozen=True)
class _FileNames:
    limit: str
    current: str
    reclaimable: str
    """An entry of the cgroup's file of statistics. The other fields are names of files."""
    throttle: str | None


_NAMES: dict[int, _FileNames] = {
    1: _FileNames("memory.limit_in_bytes", "memory.usage_in_bytes", reclaimable="total_inactive_file", throttle=None),
    2: _FileNames("memory.max", "memory.current", reclaimable="inactive_file", throttle="memory.high"),
}


@dataclass(frozen=True)
class _Level:
    limit: int | None
    throttle: int | None
    current: int | None
    available: int | None


def read_cgroup(files: HostFiles) -> Cgroup | None:
    """The memory limits of this process; None if its control group is not found."""
    location = locate(files)
    return read_cgroup_at(files, location) if location is not None else None


def read_cgroup_at(files: HostFiles, location: CgroupLocation) -> Cgroup:
    """The same for a known location. Finding the files takes longer than reading them, so frequent callers use this."""
    levels = [_read_level(files, folder, location.version) for folder in location.folders()]
    limited = [level for level in levels if level.limit is not None]
    tightest = min(limited, key=lambda level: level.limit or 0, default=None)
    return Cgroup(
        version=location.version,
        limit=tightest.limit if tightest else None,
        throttle=min((level.throttle for level in levels if level.throttle is not None), default=None),
        current=tightest.current if tightest else next((v.current for v in levels if v.current is not None), None),
        available=min((level.available for level in limited if level.available is not None), default=None),
    )


def locate(files: HostFiles) -> CgroupLocation | None:
    """Find the memory controller. On a hybrid system with both versions, version 1 owns it."""
    membership = parse_membership(files.read(MEMBERSHIP) or "")
    mounts = parse_mounts(files.read(MOUNTS) or "")
    versions: tuple[Literal[1, 2], ...] = (1, 2)
    for version in versions:
        if version in membership and version in mounts:
            mount_point, mount_root = mounts[version]
            return CgroupLocation(version, mount_point, _below(membership[version], mount_root))
    return None


def _below(path: str, mount_root: str) -> tuple[str, ...]:
    """The group relative to the mount. A container without a cgroup namespace mounts only a branch of the tree."""
    names = _names(path)
    root = _names(mount_root)
    return names[len(root) :] if names[: len(root)] == root else ()


def _names(path: str) -> tuple[str, ...]:
    # The kernel writes a group outside of this namespace as "/../..". Its files are not visible.
    names = tuple(name for name in path.split("/") if name not in ("", "."))
    return () if ".." in names else names


def parse_membership(text: str) -> dict[int, str]:
    """Parse `/proc/self/cgroup`: the path of the process's group, by version, in hierarchies that can limit memory."""
    found: dict[int, str] = {}
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if parts[0] == "0" and parts[1] == "":
            found[2] = parts[2]
        elif "memory" in parts[1].split(","):
            found[1] = parts[2]
    return found


def parse_mounts(text: str) -> dict[int, tuple[str, str]]:
    """Parse `/proc/self/mountinfo`: (mount point, part of the hierarchy mounted there), by version."""
    found: dict[int, tuple[str, str]] = {}
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, source = left.split(" "), right.split(" ")
        if not separator or len(fields) < 5 or len(source) < 3:
            continue
        mount = (_unescape(fields[4]), _unescape(fields[3]))
        if source[0] == "cgroup2":
            found.setdefault(2, mount)
        elif source[0] == "cgroup" and "memory" in source[2].split(","):
            found.setdefault(1, mount)
    return found


def _unescape(text: str) -> str:
    """Decode special characters such as blanks, which the kernel writes as a backslash and three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _read_level(files: HostFiles, folder: str, version: int) -> _Level:
    names = _NAMES[version]
    limit = _limit(files.read(f"{folder}/{names.limit}"))
    current = parse_integer(files.read(f"{folder}/{names.current}"))
    throttle = _limit(files.read(f"{folder}/{names.throttle}")) if names.throttle else None
    available = None
    if limit is not None and current is not None:
        reclaimable = parse_fields(files.read(f"{folder}/memory.stat") or "").get(names.reclaimable, 0)
        available = max(0, limit - max(0, current - reclaimable))
    return _Level(limit, throttle, current, available)


def _limit(text: str | None) -> int | None:
    value = parse_integer(text)  # None for "max", which means no limit
    return None if value is None or value >= _V1_UNLIMITED else value
