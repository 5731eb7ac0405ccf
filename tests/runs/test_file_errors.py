"""Whole runs whose disk fails: each ends with words and no traceback, and the same command then comes to its end."""

from __future__ import annotations

import errno
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from faults.commands import Commands
from faults.injection import Fault, Operation
from runs.launched import write_config
from runs.made import TinyModel, config_for
from runs.test_killed import CASES, listing

NUMBERS = (errno.EIO, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EACCES, errno.ENOTDIR)
_RANDOM = re.compile(r"[0-9a-f]{32}")


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as found:
        yield found


@pytest.mark.full
@pytest.mark.parametrize("times", [pytest.param(1, id="once"), pytest.param(0, id="for good")])
@pytest.mark.parametrize("family", CASES)
def test_a_disk_that_fails(family: str, times: int, commands: Commands, tiny_model: TinyModel, tmp_path: Path) -> None:
    """At calls of different kinds, chosen by a seed, each with an error of its own."""
    sections: dict[str, Any] = {**CASES[family], "logging": {"every_steps": 1, "trackers": []}}
    config = config_for(family, tiny_model, tmp_path, **sections)
    file, out, log = write_config(config, tmp_path / "c.yaml"), Path(config.output_dir), tmp_path / "calls"
    below = f"{out}*"
    ended = commands.run(["train", str(file)], faults=[Fault(below, "any", "list")], log=log)
    assert ended.code == 0, ended.errors
    expected = listing(out)
    calls = [line.split(" ", 1) for line in log.read_text().splitlines()]
    kinds: dict[tuple[str, str], list[int]] = {}
    for number, (operation, path) in enumerate(calls):
        kinds.setdefault((operation, _RANDOM.sub("*", path)), []).append(number)
    seeded = random.Random(f"{family} {times}")
    for kind in seeded.sample(sorted(kinds), 12):
        at, number = seeded.choice(kinds[kind]), seeded.choice(NUMBERS)
        operation: Operation = next(one for one in get_args(Operation) if one == kind[0])
        fault = Fault(below, operation, number, after=sum(one == operation for one, _ in calls[:at]), times=times)
        shutil.rmtree(out)
        ended = commands.run(["train", str(file)], faults=[fault])
        assert "Traceback" not in ended.errors, (fault, ended.errors)
        assert ended.code in (0, 1), (fault, ended.errors)
        if ended.code:
            assert "\n  try " in ended.errors + ended.out or "    try " in ended.errors, (fault, ended.errors)
        again = commands.run(["train", str(file)])
        assert again.code == 0, (fault, ended.errors, again.errors)
        assert expected - listing(out) <= {name for name in expected if name.startswith(("samples/", "report."))}, fault
