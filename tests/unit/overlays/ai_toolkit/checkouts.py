"""A checked-out stand-in for ai-toolkit, with or without our extension, imported as ai-toolkit imports itself."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gracetune.hostmem.sensors import HostReading

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[3]
OVERLAY = ROOT / "overlays" / "ai_toolkit"
NAME = "gracetune_overlay"
_THEIRS = ("toolkit", "jobs", "extensions", "extensions_built_in")


@dataclass(frozen=True)
class Checkout:
    root: Path

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(name)

    def ours(self, name: str) -> Any:
        return importlib.import_module(f"extensions.{NAME}.{name}")

    def process(self, block: Any = None, **changes: Any) -> dict[str, Any]:
        """One process of a job: two experts, three images, everything cached on disk."""
        images = self.root / "pictures"
        if not images.exists():
            images.mkdir()
            for name in ("kite", "teapot", "boat"):
                (images / f"{name}.png").touch()
        found: dict[str, Any] = {
            "type": "diffusion_trainer",
            "training_folder": str(self.root / "output"),
            "train": {"optimizer": "adamw", "lr": 1e-4, "steps": 6},
            "model": {"arch": "wan22_14b:t2v"},
            "datasets": [
                {
                    "folder_path": str(images),
                    "cache_latents_to_disk": True,
                    "cache_text_embeddings": True,
                    "num_workers": 0,
                    "prefetch_factor": None,
                }
            ],
        }
        for name, value in changes.items():
            found[name] = {**found[name], **value} if isinstance(found.get(name), dict) else value
        return found if block is None else {**found, "gracetune": block}

    def job(self, *processes: dict[str, Any], name: str = "my_job") -> Any:
        return self.module("jobs").ExtensionJob({"name": name, "process": list(processes)})

    def run(self, block: Any = None, name: str = "my_job", **changes: Any) -> Any:
        """The process, after its run."""
        job = self.job(self.process(block, **changes), name=name)
        job.run()
        return job.process[0]

    def output(self, name: str = "my_job") -> Path:
        return self.root / "output" / name


def plenty_of_memory(sensor: object) -> HostReading:
    """In place of `HostSensor.read`: what else this machine is doing must not decide what stays on disk."""
    return HostReading(1 << 50, None)


@contextmanager
def checked_out(root: Path, *, overlay: bool = True) -> Iterator[Checkout]:
    (root / "extensions").mkdir(parents=True)
    for folder in ("toolkit", "jobs", "extensions_built_in"):
        (root / folder).symlink_to(FOLDER / "standin" / folder)
    if overlay:
        (root / "extensions" / NAME).symlink_to(OVERLAY / NAME)
    _forget()
    sys.path.insert(0, str(root))
    try:
        yield Checkout(root)
    finally:
        sys.path.remove(str(root))
        _forget()


def _forget() -> None:
    """All of ai-toolkit, and our entry for it. Our other modules refer to no ai-toolkit, so they may stay."""
    for name in [name for name in sys.modules if name.partition(".")[0] in _THEIRS]:
        if not name.startswith(f"extensions.{NAME}."):
            del sys.modules[name]
    importlib.invalidate_caches()
