"""Every command line of the five seed documents, word for word, from a checkout.

Published weights are tiny ones here, in the folder a download would have put them into; nothing else is replaced. Lines
that cannot exist here are in docs/seed-map.md with the reason.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gracetune.cli.train_flags import read_arguments
from gracetune.config import Environment, load
from runs.launched import ROOT
from runs.made_runs import TinyModel, images
from unit.docs import seeds
from unit.docs.targets import text_of

TRAINED = (
    "accelerate launch --config_file config/accelerate_config_gh200.yaml simpletuner/train.py"
    " --config config/your_config.json",
    "accelerate launch --config_file accelerate_config_gh200.yaml train.py"
    " --config config/gh200_in_memory_example.json",
    "python train.py --config config/examples/minimal.json --attention_mechanism flash_attn_3 --max_train_steps 10",
    "python train.py --config config/examples/minimal.json --enable_manual_validation --max_train_steps 10",
)
WITHOUT_FOLDER = (
    "accelerate launch --config_file accelerate_config_gh200.yaml train.py --config gh200_in_memory_example.json"
)
"""The two spellings of the file in the guides."""
DIAGNOSED = ("python gh200_diagnostic.py", "python gh200_diagnostic.py --oversubscription-scale 1.5")
SCRIPTS = (
    "source scripts/setup_gh200_env.sh",
    "scripts/test_gh200_features.sh",
    "scripts/test_gh200_features.sh --diagnostic",
    "scripts/test_combined_features.sh",
    "scripts/test_combined_features.sh --backend flash_attn_3",
    "scripts/test_combined_features.sh --manual-validation",
    "scripts/test_combined_features.sh --manual",
    "scripts/test_upstream_features.sh",
    "scripts/test_upstream_features.sh --attention",
)
EXPORTS = (
    'export PYTORCH_CUDA_ALLOC_CONF="use_uvm:True,uvm_oversubscription_ratio:5.0,uvm_access_pattern:gpu_first"',
    "export PYTORCH_CUDA_ALLOC_CONF='use_uvm:True,uvm_oversubscription_ratio:5.0,uvm_access_pattern:gpu_first'",
    'export PYTORCH_CUDA_ALLOC_CONF="use_uvm:True,uvm_oversubscription_ratio:3.0"',
)
NOT_HERE = ("python - <<'PY'", "git show HEAD:GH200_OPTIMIZATION_GUIDE_FINAL_V2.md > GH200_OPTIMIZATION_GUIDE_FULL.md")
"""Lines that cannot exist; the seed map gives the reason."""
_PROGRAM = re.compile(r"(?:python|accelerate|bash|source|export|git show)\s|scripts/\w+\.sh")


def commands() -> set[str]:
    """The commands in the documents: lines of shell blocks, and code spans that begin with a program."""
    found = set()
    for text in seeds.texts().values():
        joined = re.sub(r"\s*\\\n\s*", " ", text)
        lines = [line.strip() for line in joined.splitlines()]
        spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", joined)
        found |= {one for one in (*lines, *spans) if _PROGRAM.match(one)}
    return found - {"scripts/setup_gh200_env.sh"}  # named; what is typed is `source` of it


@pytest.mark.skipif(not seeds.present(), reason="the documents are not beside this checkout")
def test_no_line_of_the_documents_is_forgotten() -> None:
    assert commands() == {*TRAINED, *DIAGNOSED, *SCRIPTS, *EXPORTS, *NOT_HERE}


@pytest.mark.parametrize("line", [line for line in NOT_HERE if line.startswith("git show")])
def test_what_cannot_exist_is_in_the_seed_map(line: str) -> None:
    assert "GH200_OPTIMIZATION_GUIDE_FINAL_V2.md" in text_of("seed-map.md")
    assert not (ROOT / "GH200_OPTIMIZATION_GUIDE_FINAL_V2.md").exists(), line


@pytest.fixture
def checkout(tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A writable folder with the top-level files of a clone, and weights as if downloaded."""
    for name in ("train.py", "simpletuner", "config", "scripts", "gh200_diagnostic.py", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "accelerate_config_gh200.yaml", tmp_path)
    hub = tmp_path / "downloads" / "hub"
    sdxl = tiny_model("sdxl", "base-1.0")
    published = {
        "stabilityai/stable-diffusion-xl-base-1.0": sdxl,
        "madebyollin/sdxl-vae-fp16-fix": sdxl / "vae",  # SimpleTuner's default for SDXL
        "black-forest-labs/FLUX.1-dev": tiny_model("flux", "dev"),
    }
    for name, weights in published.items():
        repository = hub / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        (repository / "snapshots").mkdir()
        (repository / "snapshots" / ("0" * 40)).symlink_to(weights)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_of(line: str) -> tuple[str, list[str]]:
    """The script that a line starts, and its arguments."""
    words = shlex.split(line)
    if words[0] == "accelerate":
        assert words[1:3] == ["launch", "--config_file"]
        assert Path(words[3]).is_file()
        words = words[3:]
    return words[1], words[2:]


def your_config(checkout: Path) -> None:
    """The reader's own file, which one of the lines names: an example with existing data."""
    source = json.loads((ROOT / "config" / "examples" / "minimal.json").read_text())
    (checkout / "config").unlink()
    shutil.copytree(ROOT / "config", checkout / "config")
    source |= {"max_train_steps": 2, "validation_step_interval": 2, "output_dir": "output/yours"}
    (checkout / "config" / "your_config.json").write_text(json.dumps(source))


@pytest.mark.parametrize("line", [*TRAINED, WITHOUT_FOLDER])
def test_a_training_line_is_understood(line: str, checkout: Path) -> None:
    your_config(checkout)
    script, words = words_of(line)
    assert Path(script).is_file()
    launch = read_arguments(words)
    config = load(launch.request.config, environment=Environment({}), overrides=launch.request.overrides).config
    if "--max_train_steps" in words:
        assert config.training.max_steps == 10
    if "flash_attn_3" in words:
        assert config.training.attention == "flash_attn_3"
    assert bool([note for note in launch.notes if "config/" in note]) == (line == WITHOUT_FOLDER)


def ran(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """Run a `python` command line in this process."""
    script, words = words_of(line)
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    captured = capsys.readouterr()
    return int(str(ended.value.code)), captured.out, captured.err


@pytest.mark.full
@pytest.mark.usefixtures("checkout")
def test_the_smoke_test_of_manual_validation_trains(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains `config/examples/minimal.json` with its own images."""
    code, _out, errors = ran(TRAINED[3], capsys, monkeypatch)
    assert code == 0, errors
    assert "gracetune validate-now" in errors
    assert load_file("output/minimal/minimal.safetensors")


@pytest.mark.usefixtures("checkout")
def test_the_smoke_test_of_flash_attention_needs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _out, errors = ran(TRAINED[2], capsys, monkeypatch)
    if code != 0:
        heard = " ".join(errors.split())
        assert "flash_attn_3" in heard
        assert "training.attention" in heard
        assert "Traceback" not in heard


@pytest.mark.parametrize("line", DIAGNOSED)
def test_a_diagnostic_line_writes_its_report(
    line: str, checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _out, errors = ran(line, capsys, monkeypatch)
    assert code in (0, 1), errors  # 1: something about this machine is wrong, and the report says what
    assert json.loads((checkout / "gh200_diagnostic_report.json").read_text())["uvm_allocation_test"]


@pytest.mark.parametrize("line", SCRIPTS)
def test_a_script_is_there_and_takes_its_flags(line: str, checkout: Path) -> None:
    command = f"{line} --help" if line.startswith("scripts/") else f"{line} && env"
    variables = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    assert ("--help" if line.startswith("scripts/") else "SIMPLETUNER_GH200_ENABLE_UVM_HINTS=1") in done.stdout


@pytest.mark.parametrize("line", EXPORTS)
def test_an_exported_allocator_string_is_the_configs(line: str, checkout: Path) -> None:
    name, _, value = shlex.split(line)[1].partition("=")
    found = load(Path("config/examples/minimal.json"), environment=Environment({name: value})).config.memory
    assert found.use_uvm
    assert f"uvm_oversubscription_ratio:{found.uvm_oversubscription_ratio}" in value


@pytest.mark.full
@pytest.mark.parametrize("line", [TRAINED[0], TRAINED[1], WITHOUT_FOLDER])
def test_an_accelerate_line_trains(line: str, checkout: Path) -> None:
    """With the real launcher. The guides' dataset is an absolute path, so our dataset's path follows the line."""
    your_config(checkout)
    rest = ""
    if "gh200_in_memory_example" in line:
        current = {
            "datasets[0].path": images(checkout / "data"), "datasets[0].resolution": 64.0, "training.max_steps": 2,
            "schedule.warmup_steps": 1, "validation.width": 64, "validation.height": 64, "validation.steps": 2,
        }  # fmt: skip
        rest = "".join(f" --set '{key}={value}'" for key, value in current.items())
    launcher = Path(sys.executable).with_name("accelerate")
    done = subprocess.run(
        ["bash", "-c", line.replace("accelerate", str(launcher), 1) + rest],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = (checkout / "output").glob("*/*.safetensors")
    assert load_file(file)
