"""Complete runs on machines with little memory, modelled by /proc/meminfo."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from faults.commands import Commands, Ended
from gracetune.memory.sensors import Vitals
from gracetune.memory.watchdog import Floors, Watchdog
from runs.launched import write_config
from runs.made_runs import TinyModel, config_for, run
from runs.test_resume import states

MEMINFO = Path("/proc/meminfo")
MIB = 1 << 20


def test_a_run_that_meets_its_floor_before_its_first_step_has_failed(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 1. After 3, a scheduler would restart it for ever. No message claims that it was saved."""
    config = config_for("flux", tiny_model, tmp_path, training={"max_steps": 2})
    dog = Watchdog(lambda: Vitals(0, None), Floors(host=MIB), report=lambda event: None, period=0.005)

    def started() -> Watchdog:
        while dog.alive and dog.requested() is None:
            time.sleep(0.005)
        return dog

    with monkeypatch.context() as patched:
        patched.setattr("gracetune.train.load.watch", lambda *_: dog)
        patched.setattr("gracetune.train.callbacks.MemoryGuard.start", lambda *_: started() and None)
        result = run(config)
    assert result.stop is not None
    assert (result.stop.kind, result.step) == ("failed", 0)
    assert "of main memory left, the floor is" in result.stop.reason
    assert not [*(tmp_path / "out" / "checkpoints").glob("checkpoint-*")]
    assert run(config).step == 2


class Machine:
    """A machine whose /proc/meminfo can change during a run."""

    def __init__(self, folder: Path, total: int, available: int) -> None:
        self.file, self._total = folder / "meminfo", total
        self.leave(available)

    def leave(self, available: int) -> None:
        values = {"MemTotal": self._total, "MemFree": available // 2, "MemAvailable": available}
        text = "".join(f"{name}: {value // 1024} kB\n" for name, value in values.items())
        with self.file.open("r+" if self.file.exists() else "w") as file:  # the same file: it is mounted
            file.write(text.ljust(200))


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as found:
        yield found


@contextmanager
def when(happened: Callable[[], bool], then: Callable[[], None]) -> Iterator[None]:
    over = threading.Event()

    def watch() -> None:
        while not over.is_set() and not happened():
            time.sleep(0.002)
        if not over.is_set():
            then()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.full
def test_the_floor_follows_the_size_of_the_machine(commands: Commands, tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_for("flux", tiny_model, tmp_path, training={"max_steps": 30}, logging={"trackers": []})
    file, out = write_config(config, tmp_path / "c.yaml"), Path(config.output_dir)
    machine = Machine(tmp_path, 3072 * MIB, 200 * MIB)

    def train(*options: str) -> Ended:
        return commands.run(["train", str(file), *options], instead={MEMINFO: machine.file})

    for _ in range(2):  # the same again: nothing makes it loop
        ended = train()
        assert ended.code == 1, ended.errors
        assert ended.errors.count("the floor is 384 MiB") == 1, ended.errors
        assert "saved" not in ended.errors + ended.out
        assert not out.exists()

    machine.leave(1536 * MIB)  # half of it: enough for a tiny run, where a fixed floor of 2 GiB let none begin
    with when(lambda: (out / "checkpoints").exists(), lambda: machine.leave(100 * MIB)):
        ended = train()
    assert ended.code == 1, "memory ran out before the first step"
    assert ended.errors.count("the floor is") == 1
    assert not [*(out / "checkpoints").glob("checkpoint-*")]

    machine.leave(1536 * MIB)
    log = out / "logs" / "events.jsonl"
    # The test's thread may get no core for as long as 30 steps take: so many steps that the run cannot end before.
    with when(lambda: log.exists() and b'"step":2' in log.read_bytes(), lambda: machine.leave(100 * MIB)):
        ended = train("--max-steps", "2000")
    assert ended.code == 3, ended.errors
    (saved,) = re.findall(r"interrupted and saved at step (\d+)", ended.out)
    machine.leave(1536 * MIB)
    steps = max(30, int(saved) + 1)
    assert train("--max-steps", str(steps)).code == 0
    training = config.training.model_copy(update={"max_steps": steps})
    whole = config.model_copy(update={"output_dir": str(tmp_path / "whole"), "training": training})
    run(whole)
    expected = states(whole, steps)
    assert all(
        torch.equal(tensor, expected[name][key])
        for name, tensors in states(config, steps).items()
        for key, tensor in tensors.items()
    )
