"""The stand-in and the overlay's points against what was recorded of the real ai-toolkit."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from gracetune.cli.main import app
from gracetune.integrations.ai_toolkit_points import POINTS as CHECKED
from unit.overlays.ai_toolkit.checkouts import FOLDER, OVERLAY, ROOT, Checkout

FACTS = json.loads((ROOT / "tests" / "golden" / "upstream" / "ai-toolkit-hooks.json").read_text())
BY_TARGET = {fact["target"]: fact for fact in FACTS["points"]}


def look_up(shared: Checkout, target: str) -> Any:
    module, _, path = target.partition(":")
    found: Any = shared.module(module)
    for step in path.split("."):
        found = inspect.getattr_static(found, step)
    return found.__func__ if isinstance(found, classmethod) else found


@pytest.mark.parametrize("target", BY_TARGET)
def test_the_stand_in_has_the_recorded_signature(shared: Checkout, target: str) -> None:
    function, fact = look_up(shared, target), BY_TARGET[target]
    if "from" in fact:
        assert function.__module__ == fact["from"]
        return
    recorded = inspect.signature(eval(f"lambda {', '.join(fact['parameters'])}: None"))
    found = inspect.signature(function)
    assert [(each.name, each.default) for each in found.parameters.values()] == [
        (each.name, each.default) for each in recorded.parameters.values()
    ]


def test_every_point_of_the_overlay_is_recorded_with_the_parameters_it_relies_on(shared: Checkout) -> None:
    for point in shared.ours("points").POINTS:
        fact = BY_TARGET[point.target]
        if "from" in fact:
            assert point.defined == f"{fact['from']}:{point.path[-1]}"
            continue
        names = [parameter.partition("=")[0] for parameter in fact["parameters"]]
        assert set(point.parameters) <= set(names), point.target


def test_every_point_is_one_that_overlay_check_looks_for(shared: Checkout) -> None:
    needed = {f"{point.module}:{point.target}" for point in CHECKED if point.needed}
    assert {point.target for point in shared.ours("points").POINTS} <= needed


def test_overlay_check_finds_everything_it_needs_in_the_stand_in() -> None:
    done = CliRunner().invoke(app, ["overlay", "check", "ai-toolkit", "--source", str(FOLDER / "standin"), "--json"])
    assert done.exit_code == 0, done.stdout
    statuses = {point["name"]: point["status"] for point in json.loads(done.stdout)["points"]}
    assert {statuses[point.name] for point in CHECKED if point.needed} == {"present"}


def test_facts_say_where_they_were_read() -> None:
    assert FACTS["repo"] == "ostris/ai-toolkit"
    for fact in FACTS["points"]:
        assert re.fullmatch(r"[0-9a-f]{40}", fact["commit"])
        assert fact["file"].endswith(".py")


def test_the_readme_names_every_key_and_says_that_it_was_never_run_inside_ai_toolkit(shared: Checkout) -> None:
    text = (OVERLAY / "README.md").read_text()
    options = shared.ours("options")
    for key in (*options.Block.model_fields, *options.Caches.model_fields, *shared.ours("automagic").LIMITS):
        assert f"`{key}`" in text or f"{key}:" in text, key
    assert "has not been run inside ai-toolkit" in text
    assert {commit for fact in FACTS["points"] if (commit := fact["commit"][:10])} <= set(
        re.findall(r"[0-9a-f]{10}", text)
    )


def test_the_stand_in_says_what_it_is() -> None:
    assert "Nothing in it is ai-toolkit's code" in (FOLDER / "standin" / "README.md").read_text().replace("\n", " ")


WITHOUT_THE_REST = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {rest!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.path[:0] = [{tests!r}, {root!r}]
from pathlib import Path
from unit.overlays.ai_toolkit.checkouts import Checkout
checkout = Checkout(Path({root!r}))
block = {{"memory": {{"use_uvm": True}}, "caches": {{"latents": "memory", "text": "memory"}},
          "automagic": True, "pair_files": True}}
process = checkout.run(block, train={{"optimizer": "automagic"}})
print("trained", len(process.losses))
"""
MODULES = {"pyyaml": "yaml", "pillow": "PIL", "lycoris-lora": "lycoris"}


@pytest.mark.full
def test_all_features_need_only_the_packages_the_readme_installs(shared: Checkout) -> None:
    named = re.search(r"&& pip install ([a-z ]+)\n", (OVERLAY / "README.md").read_text())
    assert named is not None
    existing = {"torch", "numpy", "safetensors", *named[1].split()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependencies = {Requirement(line).name for line in project["dependencies"]}
    assert existing <= dependencies
    rest = {MODULES.get(name, name) for name in dependencies - existing}
    assert {"diffusers", "transformers", "accelerate", "peft", "lycoris", "av"} <= rest
    code = WITHOUT_THE_REST.format(tests=str(ROOT / "tests"), root=str(shared.root), rest=rest)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.strip().endswith("trained 6"), done.stderr
