"""Runs that are killed (SIGKILL) and started again: at the end their folder holds what an undisturbed run leaves."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faults.commands import Commands
from faults.injection import Fault, Operation
from runs.launched import write_config
from runs.made import TinyModel, config_for, run
from unit.cache.processes import Child

_SHARD = re.compile(r"(?<=shards/)[0-9a-f]{32}(?=\.safetensors)")
_TRACKED = re.compile(r"(?<=\.tfevents\.).*")
BOUNDARIES: tuple[Operation, ...] = ("sync", "rename", "link", "unlink", "mkdir")
SAMPLES = {"every_steps": 2, "steps": 1, "width": 64, "height": 64, "prompts": [{"prompt": "a"}, {"prompt": "b"}]}
CASES: dict[str, dict[str, Any]] = {
    "flux": {"validation": SAMPLES, "training": {"max_steps": 4}, "checkpoints": {"every_steps": 1, "keep_last": 2}},
    "wan": {
        "adapter": {"kind": "full_finetune"}, "training": {"max_steps": 3},
        "checkpoints": {"every_steps": 1, "keep_last": 1},
    },
}  # fmt: skip


def listing(folder: Path) -> set[str]:
    """Shards have random names and a killed pass leaves more of them; every start writes TensorBoard's file anew."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return {_TRACKED.sub("*", _SHARD.sub("*", name)) for name in names}


def test_killed_before_a_checkpoint_is_complete(tiny_model: TinyModel, tmp_path: Path) -> None:
    whole = config_for("flux", tiny_model, tmp_path, **CASES["flux"])
    killed = whole.model_copy(update={"output_dir": str(tmp_path / "killed")})
    run(whole)

    def die(event: str, details: tuple[Any, ...]) -> None:
        if event == "os.rename" and str(details[1]).endswith("checkpoint-2"):
            os.kill(os.getpid(), signal.SIGKILL)

    child = Child(lambda say: (sys.addaudithook(die), run(killed), None)[-1])
    while child.wait_for_word():
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == -signal.SIGKILL
    left = listing(Path(killed.output_dir))
    assert "tiny_000000002.safetensors" in left
    assert "checkpoints/checkpoint-2" not in left
    run(killed)
    assert listing(Path(killed.output_dir)) == listing(Path(whole.output_dir))


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as found:
        yield found


@pytest.mark.full
@pytest.mark.parametrize("family", CASES)
def test_killed_at_any_moment(family: str, commands: Commands, tiny_model: TinyModel, tmp_path: Path) -> None:
    """At fsync, rename and the like, chosen at random by a seed, and at moments of the clock.

    KILLS=all in the environment: at each of them, which takes about 15 minutes for a family.
    """
    config = config_for(family, tiny_model, tmp_path, **CASES[family])
    file, out, log = write_config(config, tmp_path / "c.yaml"), Path(config.output_dir), tmp_path / "calls"
    below = str(out / "*")
    ended = commands.run(["train", str(file)], faults=[Fault(below, one, "list") for one in BOUNDARIES], log=log)
    assert ended.code == 0, ended.errors
    expected, calls = listing(out), [line.split()[0] for line in log.read_text().splitlines()]
    assert len(calls) > 100
    every = [
        {"faults": [Fault(below, call, "kill", after=calls[:number].count(call))]} for number, call in enumerate(calls)
    ]
    seeded = random.Random(11)
    chosen: list[dict[str, Any]] = every if os.environ.get("KILLS") == "all" else seeded.sample(every, 20)
    chosen += [{"kill_after": seeded.uniform(0.3, ended.seconds)} for _ in range(6)]
    for kill in chosen:
        shutil.rmtree(out)
        commands.run(["train", str(file)], **kill)
        again = commands.run(["train", str(file)])
        assert again.code == 0, (kill, again.errors)
        assert listing(out) == expected, kill


@pytest.mark.full
def test_killed_again_and_again(commands: Commands, tiny_model: TinyModel, tmp_path: Path) -> None:
    """A run that gets a little further each time; it ends, and leaves what an undisturbed one leaves."""
    config = config_for("flux", tiny_model, tmp_path, **CASES["flux"])
    file, out = write_config(config, tmp_path / "c.yaml"), Path(config.output_dir)
    seeded = random.Random(5)
    first = commands.run(["train", str(file)])
    assert first.code == 0, first.errors
    expected = listing(out)
    shutil.rmtree(out)
    for _ in range(10):
        commands.run(["train", str(file)], kill_after=seeded.uniform(0.2, first.seconds))
    assert commands.run(["train", str(file)]).code == 0
    assert listing(out) == expected
