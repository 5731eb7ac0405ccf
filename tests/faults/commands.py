"""Whole `gracetune` commands that meet faults, many of them in little time.

    with Commands() as commands:
        ended = commands.run(["train", "c.yaml"], faults=[Fault("*/out/*", "rename", "kill", after=3)])

One process imports everything with the library of `injection` preloaded; each command is a fork of it, which takes
milliseconds to start. A fork has its own files for output, and can be killed after some time. What a command imports
besides, the process imports too, for those that follow.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pytest

from faults.injection import Fault, environment_of

_TESTS = Path(__file__).parents[1]
_NOT_PERMITTED = 77


@dataclass(frozen=True)
class Ended:
    code: int
    """Negative: the signal that ended it."""
    out: str
    errors: str
    seconds: float


class Commands:
    def __init__(self, *, cwd: Path | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gracetune-commands-")
        paths = os.pathsep.join(filter(None, [str(_TESTS), os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.commands"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=cwd, env={**os.environ, "PYTHONPATH": paths, **environment_of([])},
        )  # fmt: skip

    def run(
        self, arguments: Sequence[str], *, faults: Sequence[Fault] = (), log: Path | None = None,
        kill_after: float | None = None, timeout: float = 240, environment: dict[str, str] | None = None,
        instead: dict[Path, Path] | None = None, prepare: str = "",
    ) -> Ended:  # fmt: skip
        """`kill_after`: SIGKILL so many seconds after it began. `timeout`: SIGABRT, so that it says where it hangs.
        `instead`: files or folders that the command sees as others are, such as one for /proc/meminfo.
        `prepare`: a function that the command's process calls first, as "module:name"."""
        out, errors, modules = (Path(self._folder.name) / name for name in ("out", "errors", "modules"))
        job = {
            "arguments": list(arguments), "faults": "\n".join(map(str, faults)), "log": str(log or ""),
            "out": str(out), "errors": str(errors), "kill_after": kill_after, "timeout": timeout,
            "environment": environment or {}, "prepare": prepare, "modules": str(modules),
            "instead": [(str(seen), str(real)) for seen, real in (instead or {}).items()],
        }  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that starts commands has ended"
        found = json.loads(line)
        if found["code"] == _NOT_PERMITTED:
            pytest.skip(errors.read_text())
        return Ended(found["code"], out.read_text(), errors.read_text(), found["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._folder.cleanup()

    def __enter__(self) -> Commands:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# -- the process that is forked ---------------------------------------------------------------------------------------


def _serve() -> None:
    """One line of JSON for each command, and one for how it ended."""
    answers = os.fdopen(os.dup(1), "w")
    _import_all()
    for line in sys.stdin:
        job = json.loads(line)
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            _carry_out(job)
        code = _wait(child, job["kill_after"], job["timeout"])
        answers.write(json.dumps({"code": code, "seconds": time.monotonic() - began}) + "\n")
        answers.flush()
        if code == 0 and not job["prepare"]:
            _import_named(Path(job["modules"]))


def _import_named(file: Path) -> None:
    new = [name for name in file.read_text().split() if name not in sys.modules]
    for name in new:
        with suppress(ImportError):  # a module that another one puts there under that name
            importlib.import_module(name)
    if new:
        gc.collect()
        gc.freeze()


def _import_all() -> None:
    import torch

    import gracetune.cli.main
    import gracetune.train.run  # noqa: F401 - so that forks need not

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def _wait(child: int, kill_after: float | None, timeout: float) -> int:
    began = time.monotonic()
    requested = False
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        spent = time.monotonic() - began
        if (kill_after is not None and spent >= kill_after) or spent >= timeout + 10:
            os.kill(child, signal.SIGKILL)
        elif spent >= timeout and not requested:
            os.kill(child, signal.SIGABRT)
            requested = True
        time.sleep(0.002)


def _replace(instead: object) -> None:
    from unit.cache.processes import NotPermitted, own_mounts, show_instead

    assert isinstance(instead, list)
    if not instead:
        return
    try:
        own_mounts()
        for seen, real in instead:
            show_instead(Path(seen), Path(real))
    except NotPermitted as reason:
        print(reason, file=sys.stderr, flush=True)
        os._exit(_NOT_PERMITTED)


def _carry_out(job: dict[str, object]) -> None:
    import faulthandler

    from gracetune.cli.main import main

    for number, name in ((1, "out"), (2, "errors")):
        descriptor = os.open(str(job[name]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    faulthandler.enable()
    _replace(job["instead"])
    environment = job["environment"]
    assert isinstance(environment, dict)
    os.environ.update(environment)
    ctypes.CDLL(None).faults_configure(str(job["faults"]).encode(), str(job["log"]).encode())
    code = 1
    arguments = job["arguments"]
    assert isinstance(arguments, list)
    module, _, name = str(job["prepare"]).partition(":")
    if name:
        vars(importlib.import_module(module))[name]()
    before = {*sys.modules}
    try:
        main(arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:  # noqa: BLE001 - as the interpreter would
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).faults_configure(b"", b"")
        Path(str(job["modules"])).write_text("\n".join(sorted({*sys.modules} - before - {"__mp_main__"})))
        os._exit(code)


if __name__ == "__main__":
    _serve()
