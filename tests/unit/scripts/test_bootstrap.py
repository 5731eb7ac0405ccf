"""The real bootstrap.sh, venv and pip on a tiny checkout whose requirements lie in a folder: no network is used."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[2]
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "gracetune"
version = "0.1.0"
dependencies = [{dependencies}]
[project.optional-dependencies]
dev = []
"""
TORCH = "torch>=2.11.0.dev0"


class Checkout:
    def __init__(self, path: Path, environment: dict[str, str]) -> None:
        self.path = path
        self.environment = environment

    def run(self, command: str = "bash scripts/bootstrap.sh", **variables: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment | variables
        return subprocess.run(
            command,
            shell=True,
            cwd=self.path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def bootstrap(self, **variables: str) -> str:
        done = self.run(**variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def require(self, *lines: str) -> None:
        (self.path / "pyproject.toml").write_text(PYPROJECT.format(dependencies=", ".join(f'"{one}"' for one in lines)))

    def answer(self) -> str:
        return self.run(".venv/bin/gracetune").stdout.splitlines()[-1]

    def versions(self) -> dict[str, str]:
        listed = self.run(".venv/bin/python -m pip list --local --format=freeze").stdout
        return dict(line.split("==") for line in listed.splitlines())


@pytest.fixture
def checkout(tmp_path: Path, login: dict[str, str], bare_machine: Path, put_distribution, torch_files) -> Checkout:
    path = tmp_path / "check out"
    shutil.copytree(FOLDER / "tiny_checkout", path, ignore=shutil.ignore_patterns("__pycache__"))
    (path / "scripts").mkdir()
    for name in ("scripts/bootstrap.sh", "scripts/pick_torch.py", "Makefile"):
        shutil.copy(ROOT / name, path / name)
    (path / "constraints.txt").write_text("torch==2.13.0\ncompanion==2.0\nlagging==2.0\n")
    index = tmp_path / "index"
    put_distribution(index, "torch", "2.13.0", torch_files("2.13.0+cpu", None))
    put_distribution(index, "torch", "2.14.0", torch_files("2.14.0", None))
    put_distribution(index, "companion", "2.0")
    put_distribution(index, "lagging", "2.0")
    put_distribution(index, "lagging", "3.0")
    # Where Debian left ensurepip out, bootstrap.sh fetches pip itself, and these tests need the network as it does.
    offline = {"PIP_NO_INDEX": "1"} if importlib.util.find_spec("ensurepip") else {}
    found = Checkout(
        path,
        login | offline | {"PIP_FIND_LINKS": str(index / "wheels"), "PYTHON": str(bare_machine / "bin" / "python")},
    )
    found.require(TORCH)
    return found


@pytest.mark.full
def test_a_bare_machine_gets_the_tested_versions_and_the_second_run_does_nothing(checkout: Checkout) -> None:
    first = checkout.bootstrap()
    assert "no torch here: .venv gets its own" in first
    assert checkout.answer() == "torch 2.13.0+cpu"

    started = time.perf_counter()
    assert checkout.bootstrap() == ""
    assert time.perf_counter() - started < 1

    checkout.require(TORCH, "companion>=1.0")
    again = checkout.bootstrap()
    assert "creating" not in again
    assert checkout.versions()["companion"] == "2.0"

    # Its Python was removed: an upgrade of the system does that.
    (checkout.path / ".venv" / "bin" / "python").unlink()
    (checkout.path / ".venv" / "bin" / "python").symlink_to("/nonexistent/python3")
    rebuilt = checkout.bootstrap()
    assert ".venv is broken: its Python is gone or too old; building it anew" in rebuilt
    assert checkout.answer() == "torch 2.13.0+cpu"


@pytest.mark.full
def test_an_interrupted_install_is_taken_up_again_and_a_moved_checkout_is_rebuilt(
    checkout: Checkout, tmp_path: Path
) -> None:
    reached = tmp_path / "reached"
    running = subprocess.Popen(
        ["bash", "scripts/bootstrap.sh"],
        cwd=checkout.path,
        env=checkout.environment | {"HANG_IN_INSTALL": str(reached)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not reached.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert reached.exists()
    assert not (checkout.path / ".venv" / "gracetune-stamp").exists()
    assert "installing" in checkout.bootstrap()
    assert checkout.answer() == "torch 2.13.0+cpu"

    checkout.path = checkout.path.rename(tmp_path / "moved")
    assert "made in another folder" in checkout.bootstrap()
    assert checkout.answer() == "torch 2.13.0+cpu"


@pytest.mark.full
def test_a_machines_venv_with_cuda_torch_is_reused(
    checkout: Checkout, machine: Path, put_distribution, torch_files
) -> None:
    put_distribution(machine, "torch", "2.11.0a0+vendor.25.12", torch_files("2.11.0a0+vendor.25.12", "13.0"))
    put_distribution(machine, "companion", "1.5")
    put_distribution(machine, "lagging", "0.9")
    checkout.require(TORCH, "companion>=1.0", "lagging>=1.0")
    python = str(machine / "bin" / "python")
    stated = checkout.bootstrap(PYTHON=python, PIP_CONSTRAINT="/nonexistent/vendor-constraints.txt")
    assert "torch 2.11.0a0+vendor.25.12 with CUDA 13.0 is already here: .venv will use it" in stated
    assert "PIP_CONSTRAINT is left aside" in stated
    assert checkout.answer() == "torch 2.11.0a0+vendor.25.12"
    local = checkout.versions()
    assert "torch" not in local  # never replaced
    assert "companion" not in local  # new enough: the machine's own stays
    assert local["lagging"] == "2.0"  # too old there: the tested version goes into .venv
    assert checkout.bootstrap(PYTHON=python) == ""


@pytest.mark.full
def test_the_systems_cuda_torch_is_reused(checkout: Checkout, base_python: Path, put_distribution, torch_files) -> None:
    user_base = Path(checkout.environment["PYTHONUSERBASE"])
    put_distribution(user_base, "torch", "2.12.0", torch_files("2.12.0+cu130", "13.0"))
    stated = checkout.bootstrap(PYTHON=str(base_python))
    assert "torch 2.12.0+cu130 with CUDA 13.0 is already here: .venv will use it" in stated
    assert "include-system-site-packages = true" in (checkout.path / ".venv" / "pyvenv.cfg").read_text()
    assert checkout.answer() == "torch 2.12.0+cu130"
    assert "torch" not in checkout.versions()


@pytest.mark.full
def test_a_venv_made_by_hand_is_kept(checkout: Checkout, base_python: Path) -> None:
    subprocess.run([base_python, "-m", "venv", checkout.path / ".venv"], check=True)
    (checkout.path / ".venv" / "mine").touch()
    assert "creating" not in checkout.bootstrap(PYTHON="")
    assert (checkout.path / ".venv" / "mine").exists()
    assert checkout.answer() == "torch 2.13.0+cpu"
    assert checkout.bootstrap(PYTHON="") == ""


@pytest.mark.full
def test_a_python_with_cuda_torch_comes_before_the_first_one(
    checkout: Checkout, machine: Path, put_distribution, torch_files
) -> None:
    put_distribution(machine, "torch", "2.11.0", torch_files("2.11.0", "13.0"))
    tools = checkout.path.parent / "tools"
    tools.mkdir()
    for name, python in (("python3", checkout.environment["PYTHON"]), ("python3.13", machine / "bin" / "python")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
        (tools / name).chmod(0o755)
    stated = checkout.bootstrap(PYTHON="", PATH=f"{tools}:{checkout.environment['PATH']}")
    assert f"creating .venv with {tools / 'python3.13'}" in stated
    assert checkout.answer() == "torch 2.11.0"


@pytest.mark.full
def test_make_test_fails_when_a_test_does_and_ends_with_the_outcome(
    checkout: Checkout, machine: Path, put_distribution, torch_files
) -> None:
    # The tiny checkout borrows pytest from the environment of this very test, as it would from a machine that has it.
    put_distribution(machine, "torch", "2.11.0", torch_files("2.11.0", "13.0"))
    borrowed = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    put_distribution(machine, "borrowed", "1.0", {"borrowed.pth": borrowed})
    (checkout.path / "test_tiny.py").write_text("def test_passes(): pass\n")
    python = str(machine / "bin" / "python")
    done = checkout.run("make test", PYTHON=python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout.splitlines()[-1]
    (checkout.path / "test_tiny.py").write_text("def test_fails(): assert False\n")
    done = checkout.run("make test", PYTHON=python)
    assert done.returncode != 0
    assert "1 failed" in done.stdout.splitlines()[-1]


@pytest.mark.full
def test_pip_stands_in_for_a_missing_ensurepip(
    checkout: Checkout, base_python: Path, tmp_path: Path, put_distribution, torch_files
) -> None:
    # Debian and Ubuntu split ensurepip off. The one test here with the network: pip itself has to come from somewhere.
    (tmp_path / "ensurepip.py").write_text("raise ImportError('left out')")
    user_base = Path(checkout.environment["PYTHONUSERBASE"])
    put_distribution(user_base, "torch", "2.12.0", torch_files("2.12.0", "13.0"))
    checkout.environment.pop("PIP_NO_INDEX", None)
    index_settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    checkout.bootstrap(**index_settings, PYTHON=str(base_python), PYTHONPATH=str(tmp_path))
    assert checkout.answer() == "torch 2.12.0"


class TestRejections:
    def rejection(self, checkout: Checkout, **variables: str) -> str:
        done = checkout.run(**variables)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert not (checkout.path / ".venv" / "gracetune-stamp").exists()
        return done.stderr

    def test_no_python_at_all(self, checkout: Checkout, tmp_path: Path) -> None:
        tools = tmp_path / "tools"
        tools.mkdir()
        for name in ("bash", "dirname", "cat", "rm", "mkdir", "env"):
            (tools / name).symlink_to(shutil.which(name) or "")
        (tools / "python3").write_text("#!/bin/sh\nexit 1\n")  # what `python3` answers when it is 3.10
        (tools / "python3").chmod(0o755)
        stated = self.rejection(checkout, PYTHON="", PATH=str(tools))
        assert "found no Python 3.11 or newer (tried: python3 python3.13" in stated
        assert "sudo apt-get install python3.12" in stated

    def test_a_python_that_does_not_run(self, checkout: Checkout) -> None:
        stated = self.rejection(checkout, PYTHON="/nonexistent/python")
        assert "PYTHON=/nonexistent/python does not run, or is older than Python 3.11." in stated

    def test_neither_ensurepip_nor_pip(self, checkout: Checkout, tmp_path: Path) -> None:
        for name in ("ensurepip", "pip"):
            (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} was left out')")
        stated = self.rejection(checkout, PYTHONPATH=str(tmp_path))
        assert "cannot create a virtual environment" in stated
        assert "sudo apt-get install python3." in stated
        assert "-venv" in stated
