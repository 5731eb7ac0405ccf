"""The recipe of the aarch64 container, as far as it can be checked without such a machine: it was never built."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from gracetune.cli.main import ENTRIES

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "docker" / "aarch64.Dockerfile"
INSTRUCTIONS = {"FROM", "RUN", "ENV", "COPY", "VOLUME", "WORKDIR", "ENTRYPOINT", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """Instruction and arguments, with continued lines joined."""
    lines = [line for line in RECIPE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined]


def test_every_instruction_is_known_and_the_first_is_an_image() -> None:
    found = instructions()
    assert {name for name, _ in found} == INSTRUCTIONS
    assert found[0][0] == "FROM"
    assert "/" not in found[0][1]  # an official image, no registry's host


def test_what_is_copied_is_tracked_and_enough_to_build_the_wheel() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    copied = [word for name, words in instructions() if name == "COPY" for word in words.split()[:-1]]
    assert [one for one in copied if not any(file == one or file.startswith(f"{one}/") for file in tracked)] == []
    manifest = [line.split()[1:] for line in (ROOT / "MANIFEST.in").read_text().splitlines() if line]
    needed = [one for words in manifest for one in words if not one.startswith("*")]
    index = json.loads((ROOT / "examples" / "index.json").read_text())
    needed += [file for example in index.values() for file in example["files"]]
    assert [one for one in needed if not any(one == given or one.startswith(f"{given}/") for given in copied)] == []


@pytest.mark.full
def test_the_copied_files_build_the_wheel_with_its_native_library(tmp_path: Path) -> None:
    for name, words in instructions():
        if name == "COPY":
            *sources, target = words.split()
            for one in sources:
                place = tmp_path / target.lstrip("/")
                if (ROOT / one).is_dir():
                    shutil.copytree(
                        ROOT / one, place, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
                    )
                else:
                    place = place / Path(one).name if target.endswith("/") else place
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / one, place)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "-w", tmp_path, tmp_path / "build"], check=True)
    (wheel,) = tmp_path.glob("gracetune-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"gracetune/memory/native/_uvm.so", "gracetune/checkout/train.py"} <= names


def test_shell_lines_parse_and_install_an_extra_that_exists() -> None:
    commands = [words for name, words in instructions() if name == "RUN"]
    for command in commands:
        assert subprocess.run(["sh", "-n", "-c", command], check=False).returncode == 0, command
    extras = re.findall(r"/build\[([\w,]+)\]", " ".join(commands))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {name for one in extras for name in one.split(",")} <= set(project["optional-dependencies"])
    assert extras
    for code in re.findall(r"python -c (\".*?\")", " ".join(commands)):
        compile(shlex.split(code)[0], "recipe", "exec")


def test_it_starts_the_command_line() -> None:
    found = dict(instructions())
    assert json.loads(found["ENTRYPOINT"]) == [
        *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    ]
    assert json.loads(found["CMD"]) == ["--help"]
    shown = re.findall(r"^#   docker run .* gracetune (\w+)", RECIPE.read_text(), re.M)
    assert set(shown) <= set(ENTRIES)
    assert len(shown) == 2
    assert "never built" in RECIPE.read_text()
