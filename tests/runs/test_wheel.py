"""`pip install gracetune` into an empty environment does in an empty folder what a checkout does."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from gracetune.cli.examples import examples
from runs.launched import ROOT
from runs.made_runs import TinyModel, images

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with our wheel and this environment's dependencies."""
    work = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    # From a copy: a build leaves files in the tree it works on.
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    listing = files.stdout
    subprocess.run(["tar", "cf", work / "tree.tar", "-T", "-"], cwd=ROOT, input=listing, check=True)
    (work / "tree").mkdir()
    subprocess.run(["tar", "xf", work / "tree.tar", "-C", work / "tree"], check=True)
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", work, work / "tree"]
    subprocess.run(build, check=True)
    venv.create(work / "venv", with_pip=False)
    python = work / "venv" / "bin" / "python"
    place = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", place], capture_output=True, text=True, check=True).stdout.strip())
    (wheel,) = work.glob("gracetune-*.whl")
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", "--target", site, wheel], check=True)
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return python


def run(python: Path, folder: Path, *arguments: str, code: int = 0) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, *arguments], cwd=folder, capture_output=True, text=True, check=False, env=clean)
    assert done.returncode == code, done.stderr
    return done.stdout


def test_what_runs_is_the_wheel(installed: Path, tmp_path: Path) -> None:
    found = run(installed, tmp_path, "-c", "import gracetune; print(gracetune.__file__)")
    assert Path(found.strip()).is_relative_to(installed.parents[1])


def test_init_and_train(installed: Path, tiny_model: TinyModel, tmp_path: Path) -> None:
    images(tmp_path / "photos", 3)
    model = str(tiny_model("sdxl", "base-1.0"))
    run(installed, tmp_path, "-m", "gracetune", "init", "photos", "--yes", "--model", model, "--steps", "2")
    run(installed, tmp_path, "-m", "gracetune", "train", "photos.yaml")
    assert (tmp_path / "output" / "photos" / "photos.safetensors").is_file()


def test_examples_and_the_guides_scripts(installed: Path, tmp_path: Path) -> None:
    for name in examples():
        run(installed, tmp_path, "-m", "gracetune", "examples", "copy", name, name)
    for name in ("gh200_large_batch", "gh200_caches_and_ramp"):  # they name other files
        run(installed, tmp_path / name, "-m", "gracetune", "config", "check", "--no-paths", f"examples/{name}.json")
    guides = tmp_path / "guides"
    assert "accelerate launch" in run(installed, guides, "train.py", "--help")
    options = ("--config", "config/examples/minimal.json", "--max_train_steps", "10", "--dry-run")
    run(installed, guides, "simpletuner/train.py", *options, code=1)  # its weights are not here
    run(installed, guides, "gh200_diagnostic.py", "--help")


def test_the_demo(installed: Path, tmp_path: Path) -> None:
    """It exits with 1 unless stars appear with the adapter, and none without it."""
    out = run(installed, tmp_path, "-m", "gracetune", "demo", "--output", "demo")
    assert "without it (same captions, same seeds), 0 of 16 do" in out
    assert (tmp_path / "demo" / "grid.png").is_file()
    assert "step 0" in (tmp_path / "demo" / "run" / "report.html").read_text()
