"""A run in its own process that meets a real fault: a full disk, or rejected memory."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gracetune.cli.main import main as gracetune
from gracetune.config import Environment, load
from gracetune.train.first_batch import FirstBatchError
from gracetune.train.run import RunOptions, train
from gracetune.train.view import View
from unit.cache.processes import NotPermitted, mount_tmpfs, own_mounts, resize_tmpfs

MIB = 1 << 20


class Frugal(View):
    """From the first batch on, the kernel allows this process only a few MiB more of address space."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name == "first batch":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + 8 * MIB
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def without_memory(file: Path) -> None:
    environment = Environment.capture()
    config = load(file, environment=environment).config
    try:
        train(config, environment=environment, options=RunOptions(), view=Frugal())
    except FirstBatchError as error:
        print(json.dumps(str(error)))


def without_room(file: Path, small: int) -> None:
    """Run the command twice: on a disk of `small` bytes that fills up, then on the same disk made larger."""
    folder = Path(load(file, environment=Environment.capture()).config.output_dir)
    try:
        own_mounts()
        mount_tmpfs(folder, small)
    except NotPermitted as reason:
        print(json.dumps({"skip": str(reason)}))
        return
    first = _command(file)
    existing = sorted(path.name for path in (folder / "checkpoints").glob("*"))
    left = sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
    resize_tmpfs(folder, 64 * MIB)
    second = _command(file)
    ended = [line for line in (folder / "logs" / "events.jsonl").read_text().splitlines() if "RunEnded" in line]
    print(json.dumps({"codes": [first, second], "there": existing, "left": left, "ended": ended[-1]}))


def without_room_for_samples(file: Path) -> None:
    folder = Path(load(file, environment=Environment.capture()).config.output_dir)
    try:
        own_mounts()
        mount_tmpfs(folder / "samples", 4096)
    except NotPermitted as reason:
        print(json.dumps({"skip": str(reason)}))
        return
    (folder / "report.html").mkdir()  # in the way of a file of that name
    code = _command(file)
    existing = sorted(path.name for path in folder.rglob("*") if path.is_file())
    print(json.dumps({"code": code, "there": existing}))


def _command(file: Path) -> object:
    try:
        gracetune(["train", str(file)])
    except SystemExit as ended:
        return ended.code
    return None


if __name__ == "__main__":
    fault, config_file = sys.argv[1], Path(sys.argv[2])
    if fault == "memory":
        without_memory(config_file)
    elif fault == "samples":
        without_room_for_samples(config_file)
    else:
        without_room(config_file, int(fault))
