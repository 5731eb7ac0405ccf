"""docs/extending.md, "Ten changes": the code on the page is put into scratch packages and seen in runs and commands.

Changes for a package of your own go into a distribution on the path. Changes to gracetune go into a copy of it, in
which only the files that the page names differ. All ten are made at once: one process trains with all of them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8").partition("\n## Ten changes\n")[2]
BLOCK = re.compile(r"^`([\w./]+)`\n\n```(\w+)\n(.*?)^```$", re.M | re.S)
OUTSIDE = ("gracetune_more", "gracetune_auraflow")


@dataclass
class Change:
    """One section of the page: the files it edits and their new content."""

    title: str
    files: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Path -> language of the block, its text."""


def changes() -> list[Change]:
    found = []
    for section in PAGE.split("\n### ")[1:]:
        title, _, text = section.partition("\n")
        blocks = BLOCK.findall(text)
        assert len(blocks) == text.count("```") // 2, f"{title}: code without its file"
        found.append(Change(title.lower(), {file: (language, code) for file, language, code in blocks}))
    return found


def patched(text: str, diff: str) -> str:
    """Apply hunks, which are found by their lines. Each must occur exactly once."""
    for hunk in diff.split("@@\n")[1:]:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if not line.startswith("+"))
        after = "".join(line[1:] for line in lines if not line.startswith("-"))
        assert text.count(before) == 1, f"{text.count(before)} times in the file:\n{before}"
        text = text.replace(before, after)
    return text


def mirrored(source: Path, copy: Path, edited: dict[Path, str]) -> None:
    """A copy of a folder: edited files are written, all others are linked."""
    copy.mkdir(parents=True)
    for entry in source.iterdir():
        if not any(path.is_relative_to(entry) for path in edited):
            (copy / entry.name).symlink_to(entry)
        elif entry.is_dir():
            mirrored(entry, copy / entry.name, edited)
    for path, text in edited.items():
        if path.parent == source:
            (copy / path.name).write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Scratch:
    source: Path
    site: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.pathsep.join((str(self.source), str(self.site)))}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    root = tmp_path_factory.mktemp("scratch")
    site = root / "site"
    shutil.copytree(ROOT / "examples" / "extending" / "gracetune_auraflow", site / "gracetune_auraflow")
    family = tomllib.loads((ROOT / "examples" / "extending" / "pyproject.toml").read_text())
    points: dict[str, dict[str, str]] = {**family["project"]["entry-points"]}
    edited: dict[Path, str] = {}
    for change in changes():
        for file, (language, code) in change.files.items():
            if file == "pyproject.toml":
                for group, names in tomllib.loads(code)["project"]["entry-points"].items():
                    points[group] = {**points.get(group, {}), **names}
                continue
            place = site / file if file.startswith(OUTSIDE) else ROOT / file
            assert place.exists() == (language == "diff"), f"{file}: a diff is for a file that is there"
            old = edited.get(place) or (place.read_text(encoding="utf-8") if place.exists() else "")
            text = patched(old, code) if language == "diff" else code
            if file.startswith(OUTSIDE):
                place.parent.mkdir(exist_ok=True)
                place.write_text(text, encoding="utf-8")
            else:
                edited[place] = text
    mirrored(ROOT / "src" / "gracetune", root / "src" / "gracetune", edited)
    metadata = site / "gracetune_more-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gracetune-more\nVersion: 1.0\n")
    text = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items())
        for group, names in points.items()
    )
    (metadata / "entry_points.txt").write_text(text)
    return Scratch(root / "src", site)


def test_the_table_lists_the_files_that_each_change_touches() -> None:
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| a")]
    listed = {row[0].strip(): {*re.findall(r"`([\w./]+)`", row[1])} for row in rows}
    assert len(listed) == 10
    family = listed.pop("a model family")
    assert not family, "a family's files have a table of their own"
    assert listed == {change.title: {*change.files} - {"pyproject.toml"} for change in changes()}


DRIVER = """
import json, sys
from pathlib import Path
from gracetune.cli.main import main
from gracetune_auraflow import FAMILY
from gracetune_auraflow.schedule import SineFlow
from gracetune_auraflow.tiny import build_tiny

asked = 0
coefficients = SineFlow.coefficients


def counted(self, level):
    global asked
    asked += 1
    return coefficients(self, level)


SineFlow.coefficients = counted
build_tiny(Path(sys.argv[1]), "v0.3")
for command in json.loads(sys.argv[2]):
    code = "none"
    try:
        main(command)
    except SystemExit as left:
        code = left.code
    print(f"\\0{code}\\0")
print(asked)
"""


@dataclass(frozen=True)
class Seen:
    """The files and output of the commands."""

    run: Path
    printed: dict[str, str]
    schedule_used: int

    def json(self, command: str) -> Any:
        return json.loads(self.printed[command])


@pytest.fixture(scope="module")
def seen(scratch: Scratch, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("run")
    model = folder / "model"
    config: dict[str, Any] = {
        "gracetune": 1,
        "name": "ten",
        "output_dir": str(folder / "out"),
        "model": {"family": "auraflow", "path": str(model), "base_precision": "fp32"},
        "datasets": [{"id": "colours", "type": "colours", "path": "four", "colours": {"count": 4}, "resolution": 64}],
        "adapter": {"kind": "outer"},
        "training": {"max_steps": 2, "mixed_precision": "fp32"},
        "optimizer": {"name": "sgd", "options": {"momentum": 0.9}, "lr": 1e-3},
        "checkpoints": {"every_steps": 2, "format": "plain"},
        "logging": {"trackers": ["csv"], "every_steps": 1},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(config))
    theirs = json.loads((ROOT / "examples" / "gh200_large_batch.json").read_text())
    (folder / "theirs.json").write_text(json.dumps({**theirs, "deterministic_kernels": True}))
    job, out = str(folder / "job.yaml"), folder / "out"
    commands = {
        "families": ["families"],
        "data": ["data", "show", "--no-sheets", job, "--json"],
        "train": ["train", job],
        "resume": ["train", job, "--max-steps", "3", "--json"],
        "adapter": ["adapter", "inspect", str(out / "ten.safetensors"), "--json"],
        "again": ["config", "show", str(out / "config.yaml"), "--json"],
        "theirs": ["config", "show", str(folder / "theirs.json"), "--json"],
    }
    done = subprocess.run(
        [sys.executable, "-B", "-c", DRIVER, str(model), json.dumps([*commands.values()])],
        env=scratch.environment, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    *parts, last = done.stdout.split("\0")
    assert parts[1::2] == ["0"] * len(commands), done.stdout + done.stderr
    return Seen(out, dict(zip(commands, parts[::2], strict=True)), int(last))


def test_a_model_family(seen: Seen) -> None:
    assert list(seen.run.glob("*.safetensors")), "trained by its name alone"


def test_an_optimizer(seen: Seen) -> None:
    *_, state = sorted(seen.run.glob("checkpoints/*/optimizer.json"))
    assert json.loads(state.read_text())["optimizer"] == "SGD"


def test_a_dataset_backend(seen: Seen) -> None:
    assert seen.json("data")["datasets"][0]["samples"] == 4, "images that are in no folder"
    assert seen.json("resume")["step"] == 3
    # The run's own copy of its config, from which it can be started again, has the options too.
    assert seen.json("again")["config"]["datasets"][0]["colours"] == {"count": 4}


def test_a_noise_schedule(seen: Seen) -> None:
    assert seen.schedule_used > 0


def test_a_command(seen: Seen) -> None:
    assert "auraflow" in seen.printed["families"].split()


def test_a_dialect_key(seen: Seen) -> None:
    assert seen.json("theirs")["config"]["training"]["deterministic"] is True


def test_a_telemetry_sink(seen: Seen) -> None:
    lines = (seen.run / "logs" / "steps.csv").read_text().splitlines()
    assert [int(line.partition(",")[0]) for line in lines] == [1, 2, 3]


def test_an_adapter_algorithm(seen: Seen) -> None:
    (file,) = seen.json("adapter")["files"]
    assert file["usable"]
    assert [one["algorithms"] for one in file["adapters"]] == [["outer"]]


def test_a_checkpoint_part(seen: Seen) -> None:
    """The second `train` resumed from a checkpoint with this part."""
    *_, state = sorted(seen.run.glob("checkpoints/*/host.json"))
    assert json.loads(state.read_text())["host"] == platform.node()
    lines = map(json.loads, (seen.run / "logs" / "events.jsonl").read_text().splitlines())
    assert [line["resumed_step"] for line in lines if line["kind"] == "RunStarted"] == [None, 2]
    assert f"the checkpoint was written by {platform.node()}" in seen.json("resume")["notes"]


def test_an_export_format(seen: Seen) -> None:
    with safe_open(seen.run / "ten.safetensors", "pt") as file:
        keys = [*file.keys()]
    assert all(key.startswith(("joint_transformer_blocks.", "single_transformer_blocks.")) for key in keys)
