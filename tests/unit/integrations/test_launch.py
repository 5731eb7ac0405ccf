from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from gracetune.config.environment import Environment
from gracetune.errors import ConfigError, MachineError
from gracetune.integrations import launch
from gracetune.integrations.launch import run_upstream, with_accelerate, with_overlay

SRC = Path(__file__).parents[3] / "src"
OURS = "-m gracetune_simpletuner"
STAND_IN = Path(__file__).parents[1] / "overlays" / "simpletuner" / "standin"
OVERLAY = Path(__file__).parents[3] / "overlays" / "simpletuner" / "src"


@pytest.mark.parametrize(
    ("arguments", "variables", "extra"),
    [
        (["train"], {}, OURS),
        (["train", "env=a"], {"ACCELERATE_EXTRA_ARGS": "--multi_gpu"}, f"--multi_gpu {OURS}"),
        (["train", "accelerate_extra_args=--cpu"], {"ACCELERATE_EXTRA_ARGS": "--multi_gpu"}, f"--cpu {OURS}"),
        (["train", "--accelerate_extra_args", "--cpu", "env=a"], {}, f"--cpu {OURS}"),
        (["train", "--accelerate_extra_args=--a --b=c"], {}, f"--a --b=c {OURS}"),
    ],
)
def test_our_module_is_put_behind_the_users_own(arguments: list[str], variables: dict[str, str], extra: str) -> None:
    rest, found = with_overlay(arguments, variables)
    kept = [one for one in arguments if "accelerate_extra_args" not in one and one != "--cpu"]
    assert rest == [*kept, f"accelerate_extra_args={extra}"]
    assert found["ACCELERATE_EXTRA_ARGS"] == extra


@pytest.mark.parametrize(
    ("file", "argument"), [("config.env", "x=1"), ("a/config.env", "env=a"), ("a/config.env", "--env=a")]
)
def test_what_an_env_file_says_to_accelerate_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, argument: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config" / file).parent.mkdir(parents=True)
    (tmp_path / "config" / file).write_text("A=1\nexport ACCELERATE_EXTRA_ARGS='--multi_gpu'\n")
    with pytest.raises(ConfigError, match="accelerate_extra_args='--multi_gpu'"):
        with_overlay(["train", argument], {})
    rest, _ = with_overlay(["train", argument, "accelerate_extra_args=--multi_gpu"], {})
    assert rest[-1] == f"accelerate_extra_args=--multi_gpu {OURS}"


@pytest.mark.parametrize("arguments", [[], ["server"], ["configure", "train"]])
def test_only_training_can_be_overlaid(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="--off"):
        with_overlay(arguments, {})


def test_this_environments_accelerate_is_found_first(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder in (ours, other):
        folder.mkdir()
        (folder / "accelerate").touch(mode=0o755)
    assert with_accelerate({"PATH": f"{ours}:/bin"}, ours)["PATH"] == f"{ours}:/bin"
    assert with_accelerate({"PATH": f"{other}:{ours}"}, ours)["PATH"] == f"{ours}:{other}:{ours}"
    assert with_accelerate({}, ours)["PATH"].startswith(str(ours))
    assert with_accelerate({"PATH": "/bin"}, tmp_path)["PATH"] == "/bin"


def test_another_upstream_is_rejected() -> None:
    with pytest.raises(MachineError, match="expected  simpletuner"):
        run_upstream("ai-toolkit", [], off=True, environment=Environment({}))


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MachineError) as caught:
        run_upstream("simpletuner", ["train"], off=False, environment=Environment({}))
    (line,) = re.findall(r"try +(pip install .+)", str(caught.value))
    documented = (Path(__file__).parents[3] / "docs" / "upstream.md").read_text().splitlines()
    assert line in documented, "the versions that were run"
    folder = ModuleSpec("simpletuner", None)  # of that name, as there is one in our own checkout: no package
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: folder)
    with pytest.raises(MachineError, match="simpletuner is not installed"):
        run_upstream("simpletuner", ["train"], off=False, environment=Environment({}))
    found = ModuleSpec("simpletuner", None, origin="simpletuner/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "simpletuner" else None)
    with pytest.raises(MachineError, match="overlays/simpletuner"):
        run_upstream("simpletuner", ["train"], off=False, environment=Environment({}))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """How a stand-in of upstream was really started, and with which exit code it ended."""
    monkeypatch.setattr(launch, "_require", lambda package, to_install: None)

    def start(arguments: list[str], *, off: bool, code: int = 0) -> tuple[dict[str, Any], int]:
        stated = tmp_path / "said.json"
        variables = dict(os.environ) | {"PYTHONPATH": str(STAND_IN), "STAND_IN_EXIT": str(code)}
        variables.pop("ACCELERATE_EXTRA_ARGS", None)
        descriptor = os.dup(1)
        with stated.open("w") as file:
            os.dup2(file.fileno(), 1)
            try:
                ended = run_upstream("simpletuner", arguments, off=off, environment=Environment(variables))
            finally:
                os.dup2(descriptor, 1)
                os.close(descriptor)
        return json.loads(stated.read_text()), ended

    return start


def test_off_is_what_the_user_would_have_typed(started: Any) -> None:
    stated, code = started(["train", "env=a", "--seed=1"], off=True)
    assert (stated["arguments"], stated["extra"], code) == (["train", "env=a", "--seed=1"], None, 0)
    stated, code = started(["server"], off=True, code=3)
    assert (stated["arguments"], code) == (["server"], 3)


def test_on_adds_our_module_and_hands_the_exit_code_on(started: Any) -> None:
    stated, code = started(["train", "env=a"], off=False, code=7)
    assert stated["arguments"] == ["train", "env=a", f"accelerate_extra_args={OURS}"]
    assert (stated["extra"], code) == (OURS, 7)
    assert str(Path(sys.executable).parent) in stated["path"]


@pytest.mark.parametrize("shell", ["", "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"], ids=["", "&"])
def test_being_terminated_ends_upstream_too(tmp_path: Path, shell: str) -> None:
    """In the way upstream answers to, so that its training does not go on unattended."""
    (tmp_path / "simpletuner").mkdir()
    (tmp_path / "simpletuner" / "__init__.py").touch()
    (tmp_path / "simpletuner" / "__main__.py").write_text(
        "import sys, time\ntry:\n    print('at work', flush=True)\n    time.sleep(120)\n"
        "except KeyboardInterrupt:\n    sys.exit(9)\n"
    )
    code = shell + (
        "import sys\nfrom gracetune.config.environment import Environment\n"
        "from gracetune.integrations.launch import run_upstream\n"
        "sys.exit(run_upstream('simpletuner', ['train'], off=True, environment=Environment.capture()))\n"
    )
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((str(SRC), str(tmp_path)))}
    with subprocess.Popen([sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "at work\n"
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 9
