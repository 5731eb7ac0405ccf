"""The overlay and a shell of upstream on the path, for the length of a test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gracetune.hostmem.sensors import HostReading, HostSensor

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[3]
OVERLAY = ROOT / "overlays" / "simpletuner" / "src"
STAND_IN = FOLDER / "standin"

if str(OVERLAY) not in sys.path:
    sys.path.append(str(OVERLAY))  # where tests of the other overlay or an installed one do not look


@pytest.fixture(autouse=True)
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fresh one for every test: wrappers stay where they were put."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setattr(HostSensor, "read", _plenty)
    finders = list(sys.meta_path)
    yield
    sys.meta_path[:] = finders
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "simpletuner"]:
        del sys.modules[name]


@pytest.fixture
def forget_upstream() -> Callable[[], None]:
    """For a second run in one test."""
    return _forget


def _plenty(sensor: HostSensor) -> HostReading:
    """What else this machine is doing must not decide what stays on disk."""
    del sensor
    return HostReading(1 << 50, None)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as upstream is started in: four images with captions, and a config that asks for nothing."""
    monkeypatch.chdir(tmp_path)
    images = tmp_path / "pictures"
    images.mkdir()
    for number in range(4):
        (images / f"p{number}.png").write_bytes(bytes([number]) * (10 + number))
        (images / f"p{number}.txt").write_text(f"picture {number}")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps({"output_dir": "output"}))
    datasets = [
        {"id": "text", "type": "local", "dataset_type": "text_embeds", "cache_dir": "cache/text"},
        {
            "id": "pictures",
            "type": "local",
            "dataset_type": "image",
            "instance_data_dir": "pictures",
            "cache_dir_vae": "cache/vae",
        },
    ]
    (tmp_path / "config" / "datasets.json").write_text(json.dumps(datasets))
    return tmp_path
