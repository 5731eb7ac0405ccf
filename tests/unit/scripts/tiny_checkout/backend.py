"""A build backend in one file, so that a test can run the real pip without a network. Standard library only."""

from __future__ import annotations

import base64
import hashlib
import os
import time
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def write_wheel(folder: Path, name: str, version: str, files: Mapping[str, str], requires: Sequence[str] = ()) -> Path:
    info = f"{name}-{version}.dist-info"
    contents = {
        **files,
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *requires, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{path},sha256={_digest(text)},{len(text.encode())}" for path, text in contents.items()]
    contents[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)
    return wheel


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


def build_editable(wheel_directory: str, config_settings: object = None, metadata_directory: object = None) -> str:
    if "HANG_IN_INSTALL" in os.environ:  # the test kills us here
        Path(os.environ["HANG_IN_INSTALL"]).touch()
        time.sleep(600)
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    requires = [f"Requires-Dist: {line}" for line in project["dependencies"]]
    requires += ["Provides-Extra: dev"]
    requires += [f'Requires-Dist: {line}; extra == "dev"' for line in project["optional-dependencies"]["dev"]]
    files = {
        "gracetune-here.pth": f"{FOLDER / 'src'}\n",
        "gracetune-0.1.0.dist-info/entry_points.txt": "[console_scripts]\ngracetune = gracetune:main\n",
    }
    return write_wheel(Path(wheel_directory), "gracetune", "0.1.0", files, requires).name
