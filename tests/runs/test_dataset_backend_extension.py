"""A dataset backend of another package: its options are checked. `test_ten_changes.py` trains from one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gracetune.config.native import write as write_native
from gracetune.config.registry import BACKENDS_GROUP
from runs.made_runs import TinyModel, config_for

SRC = Path(__file__).resolve().parents[2] / "src"
BACKEND = '''
"""Images that are generated when they are read; nothing is on disk."""

import io

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from gracetune.data.backend import FileStat
from gracetune.data.backend import Listing
from gracetune.data.backends.record import DatasetBackend
from gracetune.data.backends.storage import Storage
from gracetune.data.errors import MissingFileError


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(default=2, ge=1)
    caption: str = "a colour"


class MadeUp(Storage):
    def __init__(self, root, options):
        self._root = root
        self._files = {}
        for number in range(options.count):
            image = io.BytesIO()
            Image.new("RGB", (64, 64), (40 * number, 0, 90)).save(image, "PNG")
            self._files[f"{number}.png"] = image.getvalue()
            self._files[f"{number}.txt"] = options.caption.encode()

    @property
    def root(self):
        return self._root

    def survey(self):
        return Listing({path: self.stat(path) for path in sorted(self._files)})

    def stat(self, path):
        return FileStat(len(self.read(path)), 0)

    def read(self, path):
        if path not in self._files:
            raise MissingFileError(f"{path} is not made up by {self._root}")
        return memoryview(self._files[path])

    def open(self, path):
        return io.BytesIO(self.read(path))


RECORD = DatasetBackend("made_up", open=lambda opening: MadeUp(opening.dataset.path, opening.options), options=Options)
'''


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which the package is installed."""
    packages = tmp_path / "packages"
    metadata = packages / "made_up-1.0.dist-info"
    metadata.mkdir(parents=True)
    (packages / "made_up_backend.py").write_text(BACKEND)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{BACKENDS_GROUP}]\n"
        "made_up = made_up_backend:RECORD\nbroken = no_such_module:RECORD\nvideo = made_up_backend:RECORD\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(SRC), str(packages)))}


COMMANDS = """
import json, sys
from gracetune.cli.main import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as done:
        print("\\0", done.code or 0, "\\0")
"""


def gracetune(environment: dict[str, str], *commands: tuple[str, ...]) -> list[tuple[int, dict[str, Any]]]:
    """Run commands one after the other in one process, to save time. Return the exit code and the JSON of each."""
    command = [sys.executable, "-c", COMMANDS, json.dumps([[*one, "--json"] for one in commands])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    parts = done.stdout.split("\0")
    assert len(parts) == 2 * len(commands) + 1, done.stderr
    return [(int(code), json.loads(text)) for text, code in zip(parts[0::2], parts[1::2], strict=False)]


def job(tiny_model: TinyModel, root: Path, **dataset: object) -> Path:
    """A config file for a run whose only dataset comes from the package."""
    config = config_for("sdxl", tiny_model, root, training={"max_steps": 2})
    lines = write_native(config).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("datasets:"))
    rest = next(number for number, line in enumerate(lines[first + 1 :], first + 1) if line[:1].isalpha())
    entry = json.dumps({"id": "colours", "path": "of the rainbow", "resolution": 64.0, **dataset})
    file = root / "job.yaml"
    file.write_text("\n".join([*lines[:first], f"datasets: [{entry}]", *lines[rest:]]) + "\n")
    return file


def test_the_backends_own_model_checks_its_options_and_a_broken_package_stops_only_its_users(
    tiny_model: TinyModel, tmp_path: Path, installed: dict[str, str]
) -> None:
    cases = {
        "options": {"type": "made_up", "made_up": {"count": 0, "colour": "red"}},
        "elsewhere": {"type": "local", "path": str(tmp_path), "made_up": {"count": 1}},
        "broken": {"type": "broken"},
        "taken": {"type": "video"},
        "plain": {"type": "local", "path": str(tmp_path)},
    }
    files = []
    for name, dataset in cases.items():
        (tmp_path / name).mkdir()
        files.append(job(tiny_model, tmp_path / name, **dataset))
    ((code, checked),) = gracetune(installed, ("config", "check", *map(str, files)))
    assert code == 1
    found = {Path(one["path"]).parent.name: [problem["key"] for problem in one["problems"]] for one in checked["files"]}
    assert found == {
        "options": ["datasets[0].made_up.count", "datasets[0].made_up.colour"],
        "elsewhere": ["datasets[0].made_up"],
        "broken": ["datasets[0].type"],
        "taken": ["datasets[0].type"],
        "plain": [],
    }
