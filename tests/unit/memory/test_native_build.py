"""setup.py with a compiler, without, and with a broken one. The installation always succeeds, and keeps the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import pytest

from gracetune.memory.native import Unavailable, Uvm, load
from gracetune.memory.native.binding import BUILD_FAILURE

ROOT = Path(__file__).parents[3]
NATIVE = Path("gracetune/memory/native")


def installed(package: str) -> int:
    """The major version; 0 without it. find_spec("pip") is not used: with it, setuptools' import hook gives up
    replacing distutils for the whole process, and torch's compiler then fails in every later test."""
    try:
        return int(version(package).split(".")[0])
    except PackageNotFoundError:
        return 0


if installed("setuptools") < 77:
    pytest.skip("setup.py needs setuptools >= 77, and this environment has none", allow_module_level=True)
needs_pip = pytest.mark.skipif(not installed("pip"), reason="pip is not in this environment")


@pytest.fixture
def checkout(tmp_path):
    """The parts of the repository that a build needs, without results of earlier builds."""
    copy = tmp_path / "checkout"
    (copy / "src/gracetune/memory").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "LICENSE", "src/gracetune/__init__.py"):
        shutil.copy(ROOT / name, copy / name)
    for source in (ROOT / "src/gracetune").glob("*.py"):
        shutil.copy(source, copy / "src/gracetune")
    for name in ("__init__.py", "errors.py"):
        shutil.copy(ROOT / "src/gracetune/memory" / name, copy / "src/gracetune/memory")
    shutil.copytree(ROOT / "src" / NATIVE, copy / "src" / NATIVE, ignore=shutil.ignore_patterns("_uvm*", "__pycache__"))
    (copy / "README.md").write_text("for the build only\n")
    (copy / "examples").mkdir()
    (copy / "examples/index.json").write_text("{}\n")
    return copy


@pytest.fixture
def no_tools(tmp_path):
    folder = tmp_path / "no-tools"
    folder.mkdir()
    return str(folder)


def run(folder, *command, python=sys.executable, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run([python, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def build(checkout, **variables):
    return run(checkout, "setup.py", "build_ext", "--build-lib", "built", "--build-temp", "work", **variables)


def test_with_a_compiler_the_library_is_built_and_works(checkout, workshop):
    build(checkout)
    fake = workshop.fake()
    uvm = load(checkout / "built" / NATIVE / "_uvm.so", str(fake.path))
    assert isinstance(uvm, Uvm)
    uvm.free(uvm.allocate(4096, device=0))
    assert [path.name for path in (checkout / "built" / NATIVE).iterdir()] == ["_uvm.so"]


def test_without_a_compiler_the_build_says_so_and_goes_on(checkout, no_tools):
    stated = build(checkout, PATH=no_tools)
    assert "the native unified-memory library could not be built" in stated
    assert "there was no cc, gcc or clang" in stated
    assert "apt-get install gcc" in stated
    answer = load(checkout / "built" / NATIVE / "_uvm.so")
    assert isinstance(answer, Unavailable)
    assert str(answer).startswith("not available: built without a C compiler")
    assert "install gcc and run: pip install --force-reinstall --no-deps" in str(answer)


def test_a_compiler_that_fails_is_not_the_end_of_the_install_either(checkout, no_tools):
    for name in ("cc", "gcc", "clang"):
        broken = Path(no_tools) / name
        broken.write_text("#!/bin/sh\necho 'fatal error: stdint.h: No such file' >&2\nexit 1\n")
        broken.chmod(0o755)
    stated = build(checkout, PATH=f"{no_tools}:/bin")
    assert "fatal error: stdint.h" in stated
    assert "its C compiler failed" in stated
    answer = load(checkout / "built" / NATIVE / "_uvm.so")
    assert isinstance(answer, Unavailable)
    assert "its C compiler failed" in answer.reason


def test_where_pythons_own_compiler_is_missing_another_one_is_used(checkout):
    stated = build(checkout, CC="a-compiler-nobody-has")
    assert "could not be built" not in stated
    assert (checkout / "built" / NATIVE / "_uvm.so").is_file()


def test_a_later_build_in_place_replaces_what_an_earlier_one_left(checkout, no_tools):
    native = checkout / "src" / NATIVE
    steps = [({"PATH": no_tools}, BUILD_FAILURE), ({}, "_uvm.so"), ({"PATH": no_tools}, BUILD_FAILURE)]
    for variables, expected in steps:
        run(checkout, "setup.py", "build_ext", "--inplace", **variables)
        assert [path.name for path in native.glob("_uvm*")] == [expected]


def test_a_library_of_another_machine_in_the_source_tree_does_not_get_into_the_build(checkout, workshop):
    (checkout / "src" / NATIVE / "_uvm.so").write_bytes(b"\x7fELF of another machine")
    run(checkout, "setup.py", "build", "--build-base", "work", "--build-lib", "built")
    assert isinstance(load(checkout / "built" / NATIVE / "_uvm.so", str(workshop.fake().path)), Uvm)


def wheel(checkout, tmp_path, **variables):
    command = (
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "-w",
        str(tmp_path / "out"),
    )
    run(checkout, *command, **variables)
    (made,) = (tmp_path / "out").iterdir()
    return made


@needs_pip
def test_the_wheel_is_for_one_platform_and_every_python(checkout, tmp_path):
    made = wheel(checkout, tmp_path)
    assert "-py3-none-linux_" in made.name
    names = zipfile.ZipFile(made).namelist()
    assert f"{NATIVE}/_uvm.so" in names
    assert f"{NATIVE}/{BUILD_FAILURE}" not in names


@needs_pip
def test_a_wheel_made_without_a_compiler_carries_the_reason(checkout, tmp_path, no_tools):
    names = zipfile.ZipFile(wheel(checkout, tmp_path, PATH=no_tools)).namelist()
    assert f"{NATIVE}/_uvm.so" not in names
    assert f"{NATIVE}/{BUILD_FAILURE}" in names


@needs_pip
@pytest.mark.parametrize("mode", ["lenient", "strict"])
@pytest.mark.parametrize("compiler", [True, False], ids=["compiler", "no compiler"])
def test_an_editable_install_finds_its_library_or_its_reason(checkout, tmp_path, no_tools, mode, compiler):
    target = tmp_path / "venv"
    run(checkout, "-m", "venv", "--without-pip", str(target))
    site = next(target.glob("lib/python*/site-packages"))
    shared = {str(distribution(name).locate_file("")) for name in ("pip", "setuptools")}
    (site / "build-tools.pth").write_text("\n".join(sorted(shared)))
    command = ["-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "-e", "."]
    python = str(target / "bin/python")
    variables = {} if compiler else {"PATH": no_tools}
    run(checkout, *command, "--config-settings", f"editable_mode={mode}", python=python, **variables)
    ask = "from gracetune.memory.native.binding import LIBRARY, load; print(LIBRARY.is_file(), load(driver='/x.so'))"
    message = run(tmp_path, "-c", ask, python=python)
    assert message.startswith(
        "True not available: no CUDA driver" if compiler else "False not available: built without a C"
    )
