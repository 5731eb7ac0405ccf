"""`pip install gracetune` into an empty environment does in an empty folder what a checkout does."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from gracetune.cli.examples import examples
from runs.launched import ROOT
from runs.made_runs import TinyModel, images
from runs.test_commands import small

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
    (wheel,) = work.glob("gracetune-*.whl")
    subprocess.run([*pip, "--python", python, "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    place = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", place], capture_output=True, text=True, check=True).stdout.strip())
    # Only these folders of packages: their .pth files, which may lead to the checkout, are not read.
    (site / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return python


def run(program: Path, folder: Path, *arguments: str | Path, code: int = 0) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True, check=False, env=clean)
    assert done.returncode == code, done.stderr
    return done.stdout


def test_what_runs_is_the_wheel(installed: Path, tmp_path: Path) -> None:
    found = run(installed, tmp_path, "-c", "import gracetune, sys; print(gracetune.__file__, *sys.path, sep='\\n')")
    file, *path = found.splitlines()
    assert Path(file).is_relative_to(installed.parents[1])
    assert not {str(ROOT), str(ROOT / "src")} & set(path)


LOADED = """
import sys, torch
from diffusers import StableDiffusionXLPipeline
model, file = sys.argv[1:]
pipeline = StableDiffusionXLPipeline.from_pretrained(model)
def sample():
    options = {"num_inference_steps": 2, "width": 64, "height": 64, "output_type": "pt"}
    return pipeline("picture number 3", generator=torch.Generator().manual_seed(1), **options).images
plain = sample()
pipeline.load_lora_weights(file)
adapted = sample()
assert adapted.isfinite().all() and not torch.equal(plain, adapted)
assert "gracetune" not in sys.modules
"""


def test_a_folder_of_25_images_becomes_an_adapter_in_two_commands(
    installed: Path, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """All defaults, no file edited: 2,000 steps, ten validations and held-out losses, in under five minutes."""
    gracetune, model = installed.with_name("gracetune"), tiny_model("sdxl", "base-1.0")
    images(tmp_path / "photos", 25, 128)
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    run(gracetune, tmp_path, "init", "photos", "--yes", "--model", model)
    run(gracetune, tmp_path, "train", "photos.yaml")
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert min(wall, cpu) < 300  # a machine that does nothing else needs at most the smaller one
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output", "photos", "photos.yaml"]
    output = tmp_path / "output" / "photos"
    assert len({path.name[:9] for path in output.glob("samples/*_seed42.png")}) == 11
    events = [json.loads(line) for line in (output / "logs" / "events.jsonl").read_text().splitlines()]
    held_out = [one["mean"] for one in events if one["kind"] == "HeldOutLoss"]
    assert len(held_out) == 11
    assert held_out[-1] < held_out[0]
    run(installed, tmp_path, "-c", LOADED, model, output / "photos.safetensors")


def test_examples_and_the_guides_scripts(installed: Path, tiny_model: TinyModel, tmp_path: Path) -> None:
    for name in examples():
        run(installed, tmp_path, "-m", "gracetune", "examples", "copy", name, name)
    for name in ("gh200_large_batch", "gh200_caches_and_ramp"):  # they name other files
        run(installed, tmp_path / name, "-m", "gracetune", "config", "check", "--no-paths", f"examples/{name}.json")
    guides = tmp_path / "guides"
    flags = ["--attention_mechanism", "diffusers", "--max_train_steps", "2", "--set", "schedule.warmup_steps=1"]
    small_job = small(tiny_model, tmp_path, "flux", "dev")
    run(installed, guides, "train.py", "--config", "config/gh200_in_memory_example.json", *flags, *small_job)
    assert [*(tmp_path / "out").glob("*.safetensors")]
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
