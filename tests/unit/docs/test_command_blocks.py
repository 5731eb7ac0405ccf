"""Every block with commands in the README and the docs is run by a test, or has a comment that gives the reason.

<!-- run: tests/unit/docs/test_command_blocks.py -->   this file runs the block as it is written
<!-- run: tests/runs/test_init.py -->                  that test runs its commands, with files of its own
<!-- not run: needs an account -->
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from gracetune.cli.main import main
from runs.made_runs import images, sounds
from runs.test_published_examples import clip
from unit.docs.targets import ROOT, command
from unit.hardware.machines import MACHINES

GROUPS = ("adapter", "baseline", "cache", "config", "data", "examples", "overlay")
THIS_FILE = "tests/unit/docs/test_command_blocks.py"
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "LOG.md")]
OTHERS = (
    "python|accelerate|torchrun|make|pip|bash|srun|tensorboard|wandb|tail|cp|git|source|hf|mkdir|docker|curl|"
    r"scripts/\S+\.sh"
)
_COMMAND = re.compile(rf"^ *(?:\$ )?(?:[A-Z_]+=\S* )*(?:gracetune|{OTHERS}) ", re.M)
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*) -->\n\n?)?"
    r"(?:^```(?P<kind>\w*)\n(?P<fenced>.*?)^```$|(?<=\n\n)(?P<indented>(?:(?:    [^\n]*)?\n)+))",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    page: str
    mark: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines of gracetune, without remarks behind them and without what is printed."""
        lines = [line.strip().removeprefix("$ ") for line in self.text.splitlines()]
        ours = [line for line in lines if line.startswith("gracetune ")]
        return [re.split(r"\s{2,}|\s#\s", line)[0].replace("[", "").replace("]", "") for line in ours]

    def __str__(self) -> str:
        return f"{self.page}: {next(line for line in self.text.splitlines() if _COMMAND.match(line)).strip()[:50]}"


def blocks(page: Path) -> list[Block]:
    found = []
    for one in _BLOCK.finditer(page.read_text()):
        text = one["indented"] if one["fenced"] is None else one["fenced"]
        if one["kind"] not in ("python", "json", "toml") and _COMMAND.search(text):
            found.append(Block(page.name, one["mark"] or "", text))
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN_HERE = [block for block in BLOCKS if block.mark == f"run: {THIS_FILE}"]


def test_every_block_is_marked() -> None:
    assert len(BLOCKS) > 40
    assert [str(block) for block in BLOCKS if not re.match(r"run:( tests/\S+\.py)+$|not run: \S", block.mark)] == []
    named = {path.rstrip(",;") for block in BLOCKS for path in re.findall(r"(?:tests|scripts)/\S+", block.mark)}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.mark.startswith("run: ")], ids=str)
def test_the_named_tests_run_its_commands(block: Block) -> None:
    """A test that reads the page runs what it finds there. Others have every command and every flag in their text."""
    tests = block.mark.split()[1:]
    text = "".join((ROOT / test).read_text() for test in tests)
    if f'"{block.page}"' in text or f'"docs/{block.page}"' in text or THIS_FILE in tests:
        return
    lines = [line.strip() for line in block.text.splitlines() if _COMMAND.match(line)]
    programs = [line.split()[0] for line in lines if not line.startswith("gracetune ")]
    words = {_verb(line) for line in block.commands} | {Path(program).name for program in programs}
    assert [word for word in words if not re.search(rf"[\"'/ ]{re.escape(word)}[\"' ]", text)] == []
    flags = {flag for line in lines for flag in re.findall(r" (--[a-z][\w-]*)", line.split(" #")[0])}
    assert [flag for flag in sorted(flags) if f'"{flag}"' not in text and f"{flag} " not in text] == []


def _verb(line: str) -> str:
    """The last word of the command's name: `convert` of `gracetune adapter convert FILE --to comfyui`."""
    group, *words = shlex.split(line)[1:]
    return words[0] if group in GROUPS else group


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_its_commands_and_flags_exist(block: Block) -> None:
    assert [problem for line in block.commands if (problem := command(line))] == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The reader's files."""
    images(tmp_path / "photos")
    for name in ("before", "after"):
        images(tmp_path / "pairs" / name)
    sounds(tmp_path / "sounds")
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "walk.mp4").write_bytes(clip(1, 90, (160, 96)))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    example = (ROOT / "examples" / "wan22_dual_expert_lokr.yaml").read_text()
    (tmp_path / "my_job.yaml").write_text(example.replace("optimizer: adamw\n", "optimizr: adamw8bit\n"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    with pytest.raises(SystemExit):
        main(["doctor", "--from-recording", str(MACHINES / "gh200-numa"), "--output", "gh200.json"])
    capsys.readouterr()
    return tmp_path


@pytest.mark.parametrize("block", RUN_HERE, ids=str)
@pytest.mark.usefixtures("folder")
def test_a_block_runs_and_prints_what_it_shows(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines that are shown appear in this order; others may be between them."""
    printed = ""
    for line in block.commands:
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(line)[1:])
        captured = capsys.readouterr()
        assert ended.value.code == (1 if "✗" in block.text else 0), captured.err
        printed += captured.out
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    shown = [" ".join(line.split()) for line in block.text.splitlines() if not _COMMAND.match(line)]
    assert [line for line in shown if line not in ("", "...") and line not in lines] == []


def test_a_block_without_a_mark_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n    gracetune train CONFIG\n\n<!-- not run: slow -->\n```sh\nmake demo \n```\n")
    assert [(block.mark, block.commands) for block in blocks(page)] == [
        ("", ["gracetune train CONFIG"]), ("not run: slow", []),
    ]  # fmt: skip
