"""`gracetune examples`: every file of the folder belongs to an example, and a copy is complete."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from gracetune.cli.examples import checkout, examples
from runs.launched import ROOT
from runs.test_commands import gracetune

CONFIGS = [name for name in examples() if name not in ("extending", "guides")]


def test_the_checkout_is_found() -> None:
    assert checkout() == ROOT


def test_every_file_is_in_an_example() -> None:
    named = {ROOT / file for one in examples().values() for file in one.files}
    assert all(path.exists() for path in named)
    files = {path for folder in ("examples", "config") for path in (ROOT / folder).rglob("*") if path.is_file()}
    kept = {path for path in files if "__pycache__" not in path.parts and ".pytest_cache" not in path.parts}
    assert {path for path in kept if not named & {path, *path.parents}} == {ROOT / "examples" / "index.json"}


def test_the_source_distribution_has_them_too() -> None:
    lines = (ROOT / "MANIFEST.in").read_text().split()
    for one in examples().values():
        for file in one.files:
            assert file in lines or Path(file).parts[0] in lines, file
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_copy_is_sound(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert gracetune("examples", "copy", name) == 0
    first = examples()[name].files[0]
    config = "config/examples/minimal.json" if name == "minimal" else first
    assert gracetune("config", "check", "--no-paths", config) == 0, capsys.readouterr().out
    assert gracetune("examples", "copy", name) == 1
    assert "which is there" in capsys.readouterr().err
    assert gracetune("examples", "copy", name, "elsewhere") == 0
    assert (tmp_path / "elsewhere" / config).read_bytes() == (ROOT / config).read_bytes()


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert gracetune("examples", "list", "--json") == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["examples"]] == [*examples()]
    assert gracetune("examples", "list") == 0
    assert len(capsys.readouterr().out.splitlines()) == len(examples())
    assert gracetune("examples", "copy", "minimall") == 1
    assert "gracetune examples copy minimal" in capsys.readouterr().err
