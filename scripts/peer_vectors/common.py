"""What the recorders of the peers' numbers share: finding a peer's checkout, stand-ins for packages that a recorded
code path does not use, and the file that is written.

    python scripts/peer_vectors/aitoolkit_levels.py --peer CHECKOUT --out tests/golden/fidelity/aitoolkit/levels.json

A recorder imports the peer's own modules and calls them. Only numbers are written; nothing of the peer's code is kept.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.abc
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PEERS = {"ai-toolkit": "27a03a9", "SimpleTuner": "bc8e6ab"}
"""The commits that are recorded, for checkouts without a history."""
SHARES = [0.001, 0.005, 0.01, 0.02, 0.05, *(step / 20 for step in range(2, 19)), 0.95, 0.98, 0.99, 0.995, 0.999]
"""At which quantiles are written."""


def record(topic: str, values: Callable[[Path], Any]) -> None:
    """A recorder's `main`: `values` is given the checkout, which is on the import path by then."""
    parser = argparse.ArgumentParser(description=f"Record {topic} of a peer's own code.")
    parser.add_argument("--peer", type=Path, required=True, help="checkout of the peer")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    requested = parser.parse_args()
    sys.path.insert(0, str(requested.peer))
    write(requested.out, requested.peer, topic, values(requested.peer))


def write(out: Path, peer_path: Path, topic: str, values: Any) -> None:
    document = {
        "peer": peer_path.name,
        "commit": _commit(peer_path),
        "date": datetime.date.today().isoformat(),
        "script": f"scripts/peer_vectors/{Path(sys.argv[0]).name}",
        "topic": topic,
        "values": rounded(values),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_text(document), encoding="utf-8")
    print(f"{out}: {out.stat().st_size / 1024:.0f} KiB")


def _text(document: dict[str, Any]) -> str:
    """One line for each case."""
    values = document["values"]
    lines = [json.dumps(one) for one in values] if isinstance(values, list) else None
    if lines is None:
        return json.dumps(document, indent=1) + "\n"
    marked = json.dumps({**document, "values": "VALUES"}, indent=1)
    return marked.replace('"VALUES"', "[\n  " + ",\n  ".join(lines) + "\n ]") + "\n"


def _commit(peer_path: Path) -> str:
    if (peer_path / ".git").exists():
        requested = ["git", "-C", str(peer_path), "rev-parse", "--short=7", "HEAD"]
        return subprocess.run(requested, check=True, capture_output=True, text=True).stdout.strip()
    return PEERS[peer_path.name]


def rounded(value: Any) -> Any:
    """Seven digits, which is what float32 has."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {str(key): rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def quantiles(samples: Sequence[float]) -> list[float]:
    """For each of `SHARES`, the value below which this share of the samples is."""
    ordered = sorted(samples)
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in SHARES]


# -- stand-ins ---------------------------------------------------------------------------------------------------------


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _stand_in(name)
        setattr(cls, name, made)
        return made


def _stand_in(name: str) -> Any:
    def make(self: Any, *arguments: Any, **options: Any) -> None: ...

    return _Anything(name, (), {"__init__": make, "__class_getitem__": classmethod(lambda cls, item: cls)})


class _StandInModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _stand_in(name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def stand_in_for(*packages: str) -> None:
    """Packages that are missing here and that the recorded code only imports. An installed one is left alone.

    Nothing of a stand-in computes anything: a recorded code path that used one would fail or return no number.
    """
    missing = frozenset(name for name in packages if importlib.util.find_spec(name) is None)
    _remember_what_is_installed()
    sys.meta_path.append(_Finder(missing))


def _remember_what_is_installed() -> None:
    """The libraries ask once what is installed and keep the answer; they must not hear of the stand-ins."""
    import diffusers
    import peft
    import transformers

    for library in (diffusers, transformers, peft):
        utils = (
            sys.modules.get(f"{library.__name__}.utils.import_utils") or sys.modules[f"{library.__name__}.import_utils"]
        )
        for name, is_available in vars(utils).items():
            if name.startswith("is_") and name.endswith("_available") and callable(is_available):
                try:
                    is_available()
                except (TypeError, ImportError):  # asks for a version to compare with, or for a device
                    continue
