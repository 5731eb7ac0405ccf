"""A model family of another package, installed normally: its own tests, which train a LoRA, and the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which examples/extending is installed, in its own folder."""
    folder = tmp_path_factory.mktemp("outside")
    source = Path(shutil.copytree(ROOT / "examples" / "extending", folder / "source"))
    return {**installed_from(source, folder / "site"), "TESTS": str(source / "tests")}


def installed_from(source: Path, site: Path) -> dict[str, str]:
    if not any(Path(entry, "setuptools").is_dir() for entry in sys.path):
        pytest.skip("setuptools is not installed here, and the example is built without a network")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--no-cache-dir", "--target", site, source], check=True, timeout=240)
    paths = (str(ROOT / "src"), str(site))
    # Its traced footprint is kept there.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(site / "cache")}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gracetune.cli.main", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.full
def test_the_examples_own_tests_pass(installed: dict[str, str]) -> None:
    tests = Path(installed["TESTS"])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tests, tests]
    done = subprocess.run(command, env=installed, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


@pytest.mark.full
def test_the_command_line_knows_it(installed: dict[str, str], tmp_path: Path) -> None:
    def gracetune(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run(installed, *arguments)

    schema = json.loads(gracetune("config", "schema").stdout)
    assert schema["$defs"]["Model"]["properties"]["family"]["enum"][-1] == "auraflow"
    config = tmp_path / "job.yaml"
    config.write_text(
        f"gracetune: 1\nname: x\noutput_dir: {tmp_path}/out\nmodel: {{family: auraflow}}\n"
        f"datasets: [{{id: a, path: {tmp_path}/data}}]\ntraining: {{max_steps: 10}}\n"
    )
    checked = gracetune("config", "check", "--no-paths", str(config))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    machine = str(tmp_path / "machine.json")  # with room for the weights as they are
    gracetune(
        "doctor", "--from-recording", str(ROOT / "tests" / "fixtures" / "machines" / "x86-h200"), "--output", machine
    )
    plan = json.loads(gracetune("estimate", str(config), "--machine", machine, "--json").stdout)
    weights = next(line for line in plan["lines"] if line["name"] == "transformer")
    assert weights["bytes"] == 2 * 6_858_605_568
    upstream = tmp_path / "simpletuner.json"
    upstream.write_text(json.dumps({"model_family": "auraflow", "model_type": "lora", "output_dir": str(tmp_path)}))
    message = gracetune("config", "check", "--no-paths", str(upstream))
    assert "families we train" not in message.stdout + message.stderr, "SimpleTuner's name of it is ours too"


@pytest.mark.full
def test_a_copy_renamed_as_the_page_says_is_a_family_and_half_renamed_says_so(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    renaming, _, _ = page[page.index("    cp -r") :].partition("    pip install")
    subprocess.run(["bash", "-ec", f"ln -s {ROOT}/examples examples\n{renaming}"], cwd=tmp_path, check=True, timeout=30)
    source, site = tmp_path / "gracetune-myfamily", tmp_path / "site"
    environment = installed_from(source, site)
    data = tmp_path / "data"
    data.mkdir()
    Image.new("RGB", (64, 64)).save(data / "a.png")
    (data / "a.txt").write_text("a picture")
    config = tmp_path / "job.yaml"
    config.write_text(
        f"gracetune: 1\nname: x\noutput_dir: {tmp_path}/out\nmodel: {{family: myfamily}}\n"
        f"datasets: [{{id: a, path: {data}, resolution: 64}}]\ntraining: {{max_steps: 10}}\n"
    )
    shown = run(environment, "data", "show", "--no-sheets", str(config))
    assert shown.returncode == 0, shown.stdout + shown.stderr
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", source, "-k", "rejected"]
    done = subprocess.run([*tests, source / "tests"], env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout.decode()
    package = site / "gracetune_myfamily"
    for module, place in (("spec", "gracetune_myfamily.spec.SPEC"), ("keys", "SPEC.keys")):
        whole = (package / f"{module}.py").read_text()
        (package / f"{module}.py").write_text(whole.replace("family=FAMILY", 'family="other"'))
        code = "from gracetune.models.registry import spec_of; spec_of('myfamily')"
        loaded = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert f"found     family='other' in {place}\n" in loaded.stderr
        (package / f"{module}.py").write_text(whole)
    (package / "__init__.py").write_text('FAMILY = "auraflow"\n')
    rejected = run(environment, "data", "show", "--no-sheets", str(config))
    assert rejected.returncode == 1
    assert "family='auraflow' in gracetune_myfamily.names.NAMES" in rejected.stdout + rejected.stderr
    assert "Traceback" not in rejected.stderr
