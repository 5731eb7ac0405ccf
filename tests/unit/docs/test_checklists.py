"""docs/checklists.md: each line is a command that exists or a fact that can be looked at."""

from __future__ import annotations

import re

import pytest

from unit.docs.targets import command, named, problems, spans, text_of

TEXT = text_of("checklists.md")
LINES = [line.removeprefix("- [ ] ") for line in TEXT.splitlines() if line.startswith("- [ ] ")]


def test_every_list_is_there() -> None:
    headings = re.findall(r"^## (.*)$", TEXT, re.M)
    assert [heading.partition(":")[0] for heading in headings] == [
        "A new machine", "Deployment", "Each job", "Something is wrong",
    ]  # fmt: skip
    assert len(LINES) > 30


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:40])
def test_what_a_line_names_is_there(line: str) -> None:
    claimed = {name for _, name in named(line)}
    check_names = {"allocation", "baseline/"}
    commands = [span for span in spans(line) if span not in claimed | check_names]
    assert claimed or commands, "neither a command nor a fact"
    assert problems(line) + [problem for span in commands if (problem := command(span))] == []


def test_the_check_notices_what_is_not_there() -> None:
    """Each of these is wrong in one word."""
    wrong = [
        "gracetune doctr", "gracetune doctor --jsn", "gracetune cache bild CONFIG", "python gh200_diagnostics.py",
        "python validate_uvm.py --fast", "make tests", "scripts/test_nothing.sh", "frobnicate --now",
        "accelerate launch --config_file config/nothing.yaml train.py",
    ]  # fmt: skip
    assert [line for line in wrong if command(line) is None] == []
    claims = [
        "key `memory.use_uvmm`", "key `datasets[].in_memory.limit`", "file `docs/nothing.md`",
        "variable `GH200_UVM_NO`", "statistic `uvm.nothing`", "message `frobnicated all of it`",
        "result `frobnicated.json`", "Python `gracetune.gh200.prefer_no_residency`",
        "flag `--set training.batchsize=1`", "flag `--frobnicate`",
    ]  # fmt: skip
    assert [claim for claim in claims if not problems(claim)] == []
