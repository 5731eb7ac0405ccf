"""Loaded by every Python of a test run (PYTHONPATH): makes upstream run without a GPU, and writes down what it did.

The same file serves the plain run and the run with the overlay, so a difference between them is the overlay's:
- `Tensor.pin_memory` gives the tensor itself: upstream 4.x calls it on every batch and stops where there is no GPU.
- Every file opened is counted by phase (before, during and after `Trainer.train`), with the names of media files.
- The loss of every backward pass is kept, as Python prints it: to the last bit.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_MEDIA = (".png", ".jpg", ".jpeg", ".webp", ".mp4", ".wav", ".flac")
_CACHE = (".pt",)
_SIDECAR = (".txt",)


class Recorder:
    """What one process did, written when it ends."""

    def __init__(self, folder: str) -> None:
        self.folder, self.phase = folder, "before"
        self.opens: dict[str, Counter[str]] = {}
        self.media: dict[str, list[str]] = {}
        self.losses: list[float] = []
        self.trained = False

    def saw(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str) or not isinstance(arguments[1], str | None):
            return
        path, mode = arguments[0], arguments[1] or "r"
        if any(sign in mode for sign in "wxa+"):
            return
        kind = _kind_of(path)
        if kind is not None:
            self.opens.setdefault(self.phase, Counter())[kind] += 1
            if kind != "cache":
                self.media.setdefault(self.phase, []).append(path)

    def write(self) -> None:
        if not self.trained:
            return
        messages = {"losses": self.losses, "opens": self.opens, "files": self.media}
        with open(os.path.join(self.folder, f"record-{os.environ.get('RANK', '0')}.json"), "w") as file:  # noqa: PTH118, PTH123
            json.dump(messages, file, indent=1)


def _kind_of(path: str) -> str | None:
    lowered = path.lower()
    if ".dist-info" in lowered or ".egg-info" in lowered:
        return None
    for kind, endings in (("media", _MEDIA), ("cache", _CACHE), ("caption", _SIDECAR)):
        if lowered.endswith(endings):
            return kind
    return None


def _patch_torch(module: ModuleType, recorder: Recorder) -> None:
    del recorder
    if not module.cuda.is_available():
        module.Tensor.pin_memory = lambda self, *arguments, **options: self


def _patch_accelerate(module: ModuleType, recorder: Recorder) -> None:
    plain = module.Accelerator.backward

    def backward(self: Any, loss: Any, *arguments: Any, **options: Any) -> Any:
        recorder.losses.append(float(loss.detach()))
        return plain(self, loss, *arguments, **options)

    module.Accelerator.backward = backward


def _patch_trainer(module: ModuleType, recorder: Recorder) -> None:
    plain = module.Trainer.train

    def train(self: Any, *arguments: Any, **options: Any) -> Any:
        recorder.phase, recorder.trained = "training", True
        try:
            return plain(self, *arguments, **options)
        finally:
            recorder.phase = "after"

    module.Trainer.train = train


_PATCHES: dict[str, Callable[[ModuleType, Recorder], None]] = {
    "torch": _patch_torch,
    "accelerate.accelerator": _patch_accelerate,
    "simpletuner.helpers.training.trainer": _patch_trainer,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the ordinary finders find a module, and changes it right after it was executed."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = _PATCHES.get(name)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader, recorder = spec.loader, self._recorder
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            patch(module, recorder)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_folder = os.environ.get("GRACETUNE_RECORD_TO")
if _folder is not None:
    _recorder = Recorder(_folder)
    sys.meta_path.insert(0, _Finder(_recorder))
    sys.addaudithook(_recorder.saw)
    atexit.register(_recorder.write)
