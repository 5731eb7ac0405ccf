"""Runs cases, several at once: a folder for each, and one undisturbed run of each scenario to compare with."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from faults.commands import Commands, Ended
from faults.injection import Fault, environment_of
from gracetune.models.tiny import cached
from runs.launched import command_line
from storm.cases import Calls, Case, Disturbance
from storm.judging import Start, judge
from storm.scenarios import SCENARIOS

REPEAT = "PYTHONPATH=tests .venv/bin/python -m storm"


@dataclass(frozen=True)
class Outcome:
    case: Case
    starts: tuple[Start, ...]
    wrong: tuple[str, ...]
    seconds: float

    def describe(self) -> str:
        lines = [f"{self.case}: {'wrong' if self.wrong else 'right'}, {self.seconds:.1f} s"]
        for start in self.starts:
            what = "undisturbed" if start.disturbance is None else f"{start.disturbance}, met {[*start.met[:3]]}"
            lines.append(f"  exit code {start.ended.code}: {what}")
        return "\n".join([*lines, *(f"  {found}" for found in self.wrong), f"  repeat: {REPEAT} {self.case}"])

    @property
    def was_met(self) -> bool:
        """Whether the first start was disturbed at all."""
        return bool(self.starts[0].met) or self.starts[0].was_killed


class StartsCommands(Protocol):
    def run(
        self, arguments: Sequence[str], *, faults: Sequence[Fault] = ..., log: Path | None = ...,
        kill_after: float | None = ..., prepare: str = ...,
    ) -> Ended: ...  # fmt: skip


class FreshProcesses:
    """A new interpreter for each command, as a shell starts one."""

    def run(
        self, arguments: Sequence[str], *, faults: Sequence[Fault] = (), log: Path | None = None,
        kill_after: float | None = None, prepare: str = "",
    ) -> Ended:  # fmt: skip
        assert not prepare
        began = time.monotonic()
        environment = {**os.environ, **environment_of([*faults], log)}
        process = subprocess.Popen(
            [sys.executable, *command_line(*arguments)], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        timer = threading.Timer(600 if kill_after is None else kill_after, process.kill)
        timer.start()
        out, errors = process.communicate()
        timer.cancel()
        return Ended(process.returncode, out, errors, time.monotonic() - began)


class Storm:
    def __init__(self, root: Path, *, workers: int = 2) -> None:
        self._root, self._models = root, root / "models"
        self._models.mkdir(parents=True)
        for family, flavour in (("flux", "dev"), ("wan", "t2v-14b-2.2")):
            cached(family, flavour, self._models)
        self._pool = ThreadPoolExecutor(workers)
        self._idle: queue.SimpleQueue[Commands] = queue.SimpleQueue()
        self._commands = [Commands() for _ in range(workers)]
        for commands in self._commands:
            self._idle.put(commands)
        self._twins: dict[str, Future[Calls]] = {}
        self._mutex, self._numbers = threading.Lock(), iter(range(1 << 30))

    def submit(
        self, case: Case, *, prepare: str = "", fresh: bool = False, at: Sequence[Fault] = ()
    ) -> Future[Outcome]:  # fmt: skip
        """`prepare`: what every start of the case calls first, but not the undisturbed twin. `at`: what disturbs the
        first starts, one each, in place of what the seed chooses; patterns are below the case's folder."""
        return self._pool.submit(self._run, case, prepare, fresh, at)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for commands in self._commands:
            commands.close()

    def __enter__(self) -> Storm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, case: Case, prepare: str, fresh: bool, at: Sequence[Fault]) -> Outcome:
        with self._borrow() as commands:
            calls = self._twin(case.scenario, commands)
            began = time.monotonic()
            root = self._root / f"case-{next(self._numbers)}"
            file = self._write(case.scenario, root)
            log = root.with_suffix(".log")
            starter: StartsCommands = FreshProcesses() if fresh else commands
            planned = [*case.disturbances(calls, f"{root}/out*")]
            if at:
                planned = [Disturbance(replace(one, pattern=f"{root}/{one.pattern}")) for one in at]
            starts = [_start(starter, file, disturbance, log, prepare) for disturbance in (*planned, None)]
            wrong = judge(case, root, self._root / case.scenario, starts)
            if not wrong:
                shutil.rmtree(root)
            return Outcome(case, tuple(starts), tuple(wrong), time.monotonic() - began)

    @contextmanager
    def _borrow(self) -> Iterator[Commands]:
        commands = self._idle.get()
        try:
            yield commands
        finally:
            self._idle.put(commands)

    def _write(self, scenario: str, root: Path) -> Path:
        root.mkdir()
        return SCENARIOS[scenario].write(lambda family, flavour: cached(family, flavour, self._models), root)

    def _twin(self, scenario: str, commands: Commands) -> Calls:
        with self._mutex:
            known = self._twins.get(scenario)
            if known is None:
                own: Future[Calls] = Future()
                self._twins[scenario] = own
        if known is not None:
            return known.result()
        try:
            own.set_result(self._make_twin(scenario, commands))
        except BaseException as error:
            own.set_exception(error)
            raise
        return own.result()

    def _make_twin(self, scenario: str, commands: Commands) -> Calls:
        root = self._root / scenario
        log = root.with_suffix(".log")
        file = self._write(scenario, root)
        ended = commands.run(_arguments(file), faults=[Fault(f"{root}/out*", "any", "list")], log=log)
        assert ended.code == 0, ended.errors
        lines = [line.split(" ", 1) for line in log.read_text().splitlines()]
        relative = tuple((operation, path.removeprefix(str(root))) for operation, path in lines)
        return Calls(relative, ended.seconds)


def _arguments(file: Path) -> list[str]:
    """Every loss is logged: a resumed run would average over other steps."""
    return ["train", str(file), "--set", "logging.every_steps=1"]


def _start(starter: StartsCommands, file: Path, disturbance: Disturbance | None, log: Path, prepare: str) -> Start:
    log.unlink(missing_ok=True)
    faults = [] if disturbance is None or disturbance.fault is None else [disturbance.fault]
    kill_after = None if disturbance is None else disturbance.kill_after
    ended = starter.run(_arguments(file), faults=faults, log=log, kill_after=kill_after, prepare=prepare)
    met = tuple(log.read_text().splitlines()) if log.exists() else ()
    return Start(disturbance, ended, tuple(line.removeprefix("met ") for line in met))
