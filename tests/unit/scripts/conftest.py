"""Real but tiny parts for the script tests: packages made on the spot, interpreters that stand for a machine's own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from unit.scripts.tiny_checkout.backend import write_wheel

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their own module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def pick_torch() -> ModuleType:
    return load_file(SCRIPTS / "pick_torch.py")


@pytest.fixture(scope="session")
def wheel_table() -> ModuleType:
    return load_file(SCRIPTS / "wheel_table.py")


@pytest.fixture(scope="session")
def sbom() -> ModuleType:
    return load_file(SCRIPTS / "sbom.py")


@pytest.fixture(scope="session")
def base_python() -> Path:
    """The interpreter that the virtual environment of these tests was made from."""
    found = subprocess.run(
        [sys.executable, "-c", "import sys; print(sys._base_executable)"], capture_output=True, text=True, check=True
    )
    return Path(found.stdout.strip())


@pytest.fixture
def machine(tmp_path: Path, base_python: Path) -> Path:
    """An empty virtual environment that stands for the one a rented machine comes with."""
    return _empty_venv(base_python, tmp_path / "machine")


@pytest.fixture
def bare_machine(tmp_path: Path, base_python: Path) -> Path:
    """The same for a machine without torch: the system's own Python may have one, wherever these tests run."""
    return _empty_venv(base_python, tmp_path / "bare")


def _empty_venv(python: Path, prefix: Path) -> Path:
    subprocess.run([python, "-m", "venv", "--without-pip", prefix], check=True)
    return prefix


@pytest.fixture(scope="session")
def put_distribution() -> Callable[..., None]:
    """Leave behind what an installer leaves: a package and its dist-info in the site folder under a prefix."""

    def put(prefix: Path, name: str, version: str, files: dict[str, str] | None = None) -> None:
        wheel = write_wheel(prefix / "wheels", name, version, files or {f"{name}.py": ""})
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages")

    return put


@pytest.fixture(scope="session")
def torch_files() -> Callable[[str, str | None], dict[str, str]]:
    """As much of torch as the decision looks at."""

    def files(version: str, cuda: str | None) -> dict[str, str]:
        init = f"from torch import version\n__version__ = {version!r}\nprint('a build that greets its user')\n"
        return {"torch/__init__.py": init, "torch/version.py": f"cuda = {cuda!r}\n"}

    return files


@pytest.fixture
def login(tmp_path: Path) -> dict[str, str]:
    """The variables of a fresh login: no active virtual environment, no pip settings, no packages of the user."""
    dropped = ("PIP_", "PYTHON", "VIRTUAL_ENV", "MAKE", "MFLAGS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    own_bin = str(Path(sys.prefix) / "bin")
    path = [folder for folder in kept["PATH"].split(os.pathsep) if folder != own_bin]
    return kept | {"PATH": os.pathsep.join(path), "PYTHONUSERBASE": str(tmp_path / "user")}
