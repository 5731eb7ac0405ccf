"""Records are found by name, ours and those of other installed packages, and imported only when needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from gracetune.config.registry import OPTIMIZERS, Registry
from gracetune.errors import ConfigError
from gracetune.optim.record import OptimizerRecord, optimizer_record

SRC = Path(__file__).resolve().parents[3] / "src"
GROUP = "gracetune.things"


def registry(*points: tuple[str, str]) -> Registry:
    ours = {"json": "json:dumps"}
    return Registry("thing", GROUP, ours, tuple(EntryPoint(name, value, GROUP) for name, value in points))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "a_things_module.py").write_text("print('a remark')\nTHING = 'whole'\n")
    (tmp_path / "a_broken_module.py").write_text("{}['gone']\n")
    (tmp_path / "an_ending_module.py").write_text("raise SystemExit('no GPU')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "a_things_module"
    sys.modules.pop("a_things_module", None)


def test_ours_come_first_and_every_name_once() -> None:
    assert registry(("b", "x:Y"), ("a", "x:Y"), ("b", "z:Y")).names == ("json", "b", "a")


def test_both_kinds_are_loaded_the_same_way(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    things = registry(("mine", f"{module}:THING"))
    assert things.load("json")({}) == "{}"
    assert things.load("mine") == "whole"
    assert capsys.readouterr() == ("", "a remark\n")  # stdout is reserved for --json


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("mine", "no_such_module:THING", "no_such_module:THING cannot be imported: ModuleNotFoundError"),
        ("mine", "a_things_module:OTHER", "a_things_module:OTHER cannot be imported: AttributeError"),
        ("mine", "a_broken_module:THING", "a_broken_module:THING cannot be imported: KeyError: 'gone'"),
        ("mine", "an_ending_module:THING", "an_ending_module:THING cannot be imported: SystemExit: no GPU"),
        ("json", "a_things_module:THING", "several called json: gracetune itself, a_things_module:THING"),
    ],
)
def test_what_cannot_be_used_is_named(module: str, name: str, value: str, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        registry((name, value)).load(name)
    (problem,) = error.value.problems
    assert problem.key == f"the installed thing {name}"
    assert problem.found.startswith(found)
    assert GROUP in problem.hint


def test_an_algorithm_that_a_config_does_not_use_is_not_imported(tmp_path: Path) -> None:
    """Its import could take seconds, or end the command."""
    (tmp_path / "outside.py").write_text("raise SystemExit('no GPU')\n")
    metadata = tmp_path / "outside-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[gracetune.adapters]\noutside = outside:ALGORITHM\n")
    native = {
        "gracetune": 1, "name": "a", "output_dir": "o", "model": {"family": "sdxl", "path": "p"},
        "adapter": {"kind": "lokr", "by_module": {"Attention": {"algo": "LoHa", "dim": 4}}, "factor": 2},
        "training": {"max_steps": 2}, "datasets": [{"id": "a", "path": "a"}],
    }  # fmt: skip
    simpletuner = {
        "model_family": "sdxl", "model_type": "lora", "lora_type": "lycoris", "lycoris_config": "lycoris.json",
        "pretrained_model_name_or_path": "p", "output_dir": "o", "data_backend_config": "data.json",
        "optimizer": "adamw_bf16", "max_train_steps": 2,
    }  # fmt: skip
    lycoris = {"algo": "lokr", "linear_dim": 4, "apply_preset": {"target_module": ["Attention"]}}
    data = [{"id": "a", "type": "local", "instance_data_dir": "a", "crop": False}]
    texts = {"native": native, "simpletuner": simpletuner, "lycoris": lycoris, "data": data}
    for name, values in texts.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    code = (
        "import sys\nfrom gracetune.config.registry import ALGORITHM_NAMES\nfrom gracetune.cli.main import main\n"
        "assert 'outside' in ALGORITHM_NAMES\nmain(['config', 'check', '--no-paths', *sys.argv[1:]])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(SRC), str(tmp_path)))}
    command = [sys.executable, "-c", code, str(tmp_path / "native.json"), str(tmp_path / "simpletuner.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", OPTIMIZERS.names)
def test_every_optimizer_has_a_record(name: str) -> None:
    assert isinstance(optimizer_record(name), OptimizerRecord)


def test_the_optimizers_records_import_no_torch() -> None:
    """A config with any of them is checked without it."""
    code = (
        "import sys\nfrom gracetune.config.run_config import Optimizer\n"
        "from gracetune.config.registry import OPTIMIZER_NAMES\n"
        "for name in OPTIMIZER_NAMES:\n    Optimizer(name=name)\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
