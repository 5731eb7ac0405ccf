"""Families of other installed packages: found by name, imported on request, rejected with a message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from gracetune.config.families import FAMILIES, GROUP, FamilyPackages
from gracetune.errors import ConfigError
from gracetune.models.registry import FamilyParts
from unit.config.aitoolkit_jobs import job
from unit.config.simpletuner_files import GOOD, IMAGES

OURS = ("wan", "sdxl")
SRC = Path(__file__).resolve().parents[3] / "src"


def installed(*points: tuple[str, str]) -> FamilyPackages:
    ours = tuple(EntryPoint(name, f"gracetune.models.{name}", GROUP) for name in OURS)
    return FamilyPackages(ours, tuple(EntryPoint(name, value, GROUP) for name, value in points))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A family's folder with one module that is whole and one that cannot be imported."""
    name = "a_family_of_ones_own"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "keys.py").write_text("KEYS = ('a', 'b')\n")
    (folder / "spec.py").write_text("from gracetune.models.spec import NothingOfThatName\n")
    (folder / "published.py").write_text("{}['auraflow']\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for imported in [one for one in sys.modules if one.split(".")[0] == name]:
        del sys.modules[imported]  # the next test has it elsewhere


def test_names_come_after_ours_each_once() -> None:
    assert installed(("a", "p"), ("b", "q"), ("a", "r")).names == (*OURS, "a", "b")


def test_a_part_is_found_by_module_and_name(package: str) -> None:
    assert installed(("mine", package)).part("mine", "keys", "KEYS") == ("a", "b")


@pytest.mark.parametrize(
    ("module", "name", "found"),
    [
        ("keys", "OTHER", "a_family_of_ones_own.keys without OTHER"),
        ("footprint", "FOOTPRINTS", "No module named 'a_family_of_ones_own.footprint'"),
        ("spec", "SPEC", "cannot import name 'NothingOfThatName'"),
        ("published", "build_published", "a_family_of_ones_own.published cannot be imported: KeyError: 'auraflow'"),
    ],
)
def test_what_a_package_lacks_is_named(package: str, module: str, name: str, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        installed(("mine", package)).part("mine", module, name)
    (problem,) = error.value.problems
    assert problem.key == "the installed family mine"
    assert found in problem.found
    assert "pip uninstall" in problem.hint


@pytest.mark.parametrize(
    ("module", "name", "code"),
    [
        ("keys", "KEYS", "from gracetune.models.keys import KeyMap\nKEYS = KeyMap('other', 'transformer', ())\n"),
        (
            "footprint",
            "FOOTPRINTS",
            "from dataclasses import replace\nfrom gracetune.models.sdxl.footprint import FOOTPRINTS as SDXL\n"
            "FOOTPRINTS = (replace(SDXL[0], family='mine'), replace(SDXL[0], family='other'))\n",
        ),
    ],
)
def test_a_part_that_says_another_familys_name_is_rejected(
    package: str, tmp_path: Path, module: str, name: str, code: str
) -> None:
    (tmp_path / package / f"{module}.py").write_text(code)
    with pytest.raises(ConfigError) as error:
        installed(("mine", package)).part("mine", module, name)
    (problem,) = error.value.problems
    assert problem.key == "the installed family mine"
    assert problem.found == f"family='other' in {package}.{module}.{name}"
    assert problem.expected == "family='mine' there, or an entry point called other"


@pytest.mark.parametrize("points", [(("wan", "p"),), (("mine", "p"), ("mine", "q"))])
def test_a_name_that_is_taken_is_rejected_as_soon_as_it_is_asked_for(points: tuple[tuple[str, str], ...]) -> None:
    families = installed(*points)
    with pytest.raises(ConfigError, match="two families of this name"):
        families.part(points[0][0], "keys", "KEYS")
    assert families.names == (*OURS, *(name for name, _ in points[:1] if name not in OURS))


def test_a_mapping_lists_all_and_imports_only_what_is_asked_for(package: str) -> None:
    parts: FamilyParts[Any] = FamilyParts("keys", "KEYS", installed(("mine", package), ("gone", "no")))
    assert list(parts) == ["wan", "sdxl", "mine", "gone"]
    assert len(parts) == 4
    assert "gone" in parts
    assert "other" not in parts
    assert (parts["wan"].family, parts["mine"]) == ("wan", ("a", "b"))
    with pytest.raises(ConfigError, match="no\\.keys cannot be imported"):
        parts["gone"]
    with pytest.raises(KeyError):
        parts["other"]


def test_a_familys_name_is_known_to_configs_as_soon_as_it_is_installed(tmp_path: Path) -> None:
    """A distribution on the path, whose package does not even exist: its name counts, and other packages still work."""
    metadata = tmp_path / "outside-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\noutside = no_such_package\n")
    config = tmp_path / "job.yaml"
    config.write_text(
        f"gracetune: 1\nname: x\noutput_dir: {tmp_path}/out\nmodel: {{family: outside}}\n"
        f"datasets: [{{id: a, path: {tmp_path}}}]\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(SRC), str(tmp_path)))}
    both = (
        "import contextlib, sys\nfrom gracetune.cli.main import main\n"
        "with contextlib.suppress(SystemExit):\n    main(['config', 'schema'])\n"
        "print('\\0')\nmain(['config', 'check', '--no-paths', sys.argv[1]])\n"
    )
    command = [sys.executable, "-c", both, str(config)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    schema, _, rejected = done.stdout.partition("\0")
    families = json.loads(schema)["$defs"]["Model"]["properties"]["family"]["enum"]
    assert families == [*FAMILIES, "outside"]
    assert done.returncode == 1
    assert "no_such_package.names cannot be imported" in rejected + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("model", ["", ", flavour: a", ", path: /weights"], ids=["bare", "flavour", "path"])
def test_a_broken_package_stops_the_check_of_its_own_configs_only(tmp_path: Path, model: str) -> None:
    """Each family's flavours are wrong in their own way; the last is whole, and so is what we bring ourselves."""
    broken = {
        "unimportable": ("import nosuchmod", "No module named 'nosuchmod'"),
        "raising": ("FLAVOURS = {}['a']", "raising_package.flavours cannot be imported: KeyError: 'a'"),
        "ending": ("raise SystemExit(5)", "ending_package.flavours cannot be imported: SystemExit: 5"),
        "nameless": ("", "nameless_package.flavours without FLAVOURS"),
        "empty": ("FLAVOURS = ()", "FLAVOURS = ()"),
        "words": ("FLAVOURS = ('a',)", "FLAVOURS = ('a',)"),
    }
    whole = "from gracetune.config.families import Flavour\nFLAVOURS = (Flavour('a', 'b/c', 'image'),)"
    sources = {**{family: code for family, (code, _) in broken.items()}, "whole": whole}
    for family, code in sources.items():
        (tmp_path / f"{family}_package").mkdir()
        (tmp_path / f"{family}_package" / "flavours.py").write_text(code)
        (tmp_path / f"{family}.yaml").write_text(
            f"gracetune: 1\nname: x\noutput_dir: {tmp_path}/out\nmodel: {{family: {family}{model}}}\n"
            f"datasets: [{{id: a, path: {tmp_path}}}]\ntraining: {{max_steps: 10}}\n"
        )
    metadata = tmp_path / "outside-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    points = "".join(f"{family} = {family}_package\n" for family in sources)
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{points}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(SRC), str(tmp_path)))}
    files = [str(tmp_path / f"{family}.yaml") for family in sources]
    command = [sys.executable, "-m", "gracetune.cli.main", "config", "check", "--json", "--no-paths", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    *rejected, accepted = json.loads(done.stdout)["files"]
    assert accepted["problems"] == []
    for (family, (_, found)), file in zip(broken.items(), rejected, strict=True):
        (problem,) = file["problems"]
        assert problem["key"] == f"the installed family {family}"
        assert found in problem["found"]
        assert problem["expected"]


def test_a_package_says_what_the_peers_call_it_and_a_broken_one_stops_no_other(tmp_path: Path) -> None:
    head = "from gracetune.config.family_names import *\n"
    sources = {
        "whole": head + "NAMES = FamilyNames('whole', (Flavour('a', 'b/c', 'image'), Flavour('d', 'e/f', 'image')),\n"
        "    objective='flow', simpletuner=SimpleTunerNames(flavours={'v4': 'd'}, targets=LoraTargets(('to_q',))),\n"
        "    aitoolkit=AiToolkitNames(archs={'whole_big': Arch(('d',), tags={'x': 'd'}, switch='is_vega')}))",
        "words": "NAMES = 'whole'",
        "empty": head + "NAMES = FamilyNames('empty', ())",
        "another": head + "NAMES = FamilyNames('whole', (Flavour('a', 'b/c', 'image'),))",
        "raising": "{}['a']",
    }
    for family, code in sources.items():
        (tmp_path / f"{family}_package").mkdir()
        (tmp_path / f"{family}_package" / "names.py").write_text(code)
    metadata = tmp_path / "outside-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    points = "".join(f"{family} = {family}_package\n" for family in sources)
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{points}")
    datasets = [{"id": "a", "path": "a"}]
    files: dict[str, Any] = {
        family: {"gracetune": 1, "name": "x", "output_dir": "o", "model": {"family": family}, "datasets": datasets,
                 "training": {"max_steps": 1}}
        for family in ("words", "empty", "another", "raising")
    }  # fmt: skip
    peers = {"arch": {"arch": "whole_big:x", "name_or_path": "/w"}, "switch": {"is_vega": True, "name_or_path": "/w"}}
    for name, model in peers.items():
        files[name] = job()
        files[name]["config"]["process"][0]["model"] = model
    files["simpletuner"] = {**GOOD, "model_family": "whole", "model_flavour": "v4", "data_backend_config": "data.json"}
    files["missing"] = {**GOOD, "model_family": "words", "data_backend_config": "data.json"}
    for name, document in {**files, "data": IMAGES}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    program = (
        "import json, sys\nfrom pathlib import Path\n"
        "from gracetune.config import Environment, load\nfrom gracetune.errors import ConfigError\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        config = load(Path(name + '.json'), environment=Environment({})).config\n"
        "        found[name] = [config.model.family, config.model.flavour, list(config.adapter.targets)]\n"
        "    except ConfigError as error:\n"
        "        found[name] = [problem.found for problem in error.problems]\n"
        "print(json.dumps(found))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(SRC), str(tmp_path)))}
    command = [sys.executable, "-c", program, *files]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == {
        "words": ["NAMES = 'whole'"],
        "empty": ["NAMES.flavours = ()"],
        "another": ["family='whole' in another_package.names.NAMES"],
        "raising": ["raising_package.names cannot be imported: KeyError: 'a'"],
        "arch": ["whole", "d", []],
        "switch": ["whole", "d", []],
        "simpletuner": ["whole", "d", ["to_q"]],
        "missing": ["NAMES = 'whole'"],
    }
