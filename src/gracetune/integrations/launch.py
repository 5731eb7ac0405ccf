"""Starting an upstream as it starts itself, with our module run in front of its training script, or plain."""

from __future__ import annotations

import importlib.util
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gracetune.config.environment import Environment
from gracetune.errors import ConfigError, MachineError, Problem

OVERLAY = "gracetune_simpletuner"
SIMPLETUNER = '"simpletuner[cuda]==4.10.1" torch==2.13.0 torchvision==0.28.0'
"""As docs/upstream.md installs it, and says why: the newest of each do not fit together."""
_EXTRA = "accelerate_extra_args"
_EXTRA_VARIABLE = "ACCELERATE_EXTRA_ARGS"


def run_upstream(upstream: str, arguments: Sequence[str], *, off: bool, environment: Environment) -> int:
    """Upstream's exit code. `arguments` are what the user would type after its name; `off` adds nothing to them."""
    if upstream != "simpletuner":
        raise MachineError(
            f"{upstream} cannot be started from here\n  found     {upstream}\n  expected  simpletuner\n"
            "  try       start it by its own command; its extension is in overlays/ai_toolkit"
        )
    _require("simpletuner", SIMPLETUNER)
    variables = with_accelerate(environment.variables, Path(sys.executable).parent)
    if not off:
        _require(OVERLAY, "./overlays/simpletuner")
        arguments, variables = with_overlay(arguments, variables)
    _hear_ctrl_c()
    code = _waited(subprocess.Popen([sys.executable, "-m", "simpletuner", *arguments], env=variables))
    return code if code >= 0 else 128 - code


def _hear_ctrl_c() -> None:
    """A shell has what it puts into the background ignore SIGINT; upstream would inherit that, and never end."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _waited(process: subprocess.Popen[bytes]) -> int:
    """A terminal's Ctrl-C reaches upstream without us, and upstream then ends its training processes.

    SIGTERM would end its command alone and leave them running, so it is handed on as the other one.
    """
    before = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(signal.SIGINT))
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def with_overlay(arguments: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment that make accelerate run our module, which runs train.py. What the user gave stays.

    Upstream reads the argument, except with `example=`, where it reads the variable: both say the same.
    """
    if not arguments or arguments[0] != "train":
        found = arguments[0] if arguments else "nothing"
        hint = "gracetune overlay run simpletuner -- train, or with --off for upstream's other commands"
        raise ConfigError([Problem("overlay run simpletuner", found, "train", hint)])
    rest, given = _without_extra(arguments)
    if given is None:
        _reject_env_files(rest, variables)
    extra = f"{variables.get(_EXTRA_VARIABLE, '') if given is None else given} -m {OVERLAY}".strip()
    return [*rest, f"{_EXTRA}={extra}"], {**variables, _EXTRA_VARIABLE: extra}


def _without_extra(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Without the user's own extra arguments for accelerate, and those."""
    rest: list[str] = []
    given: str | None = None
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        name, equals, value = argument.partition("=")
        if name.lstrip("-") != _EXTRA:
            rest.append(argument)
        elif equals:
            given = value
        elif pending:
            given = pending.pop(0)
    return rest, given


def _reject_env_files(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Upstream sources these after us, and the argument we add would win over what they say."""
    named = [argument.partition("=")[2] for argument in arguments if argument.lstrip("-").startswith("env=")]
    environment = named[-1] if named else variables.get("ENV", "")
    for file in (Path("config", "config.env"), Path("config", environment, "config.env")):
        text = file.read_text(errors="replace") if file.is_file() else ""
        found = re.search(rf"^\s*(?:export\s+)?{_EXTRA_VARIABLE}\s*\+?=\s*(.+)$", text, re.MULTILINE)
        if found is not None:
            value = found[1].strip().strip("\"'")
            hint = f"take the line out, and add {_EXTRA}='{value}' behind `train`"
            raise ConfigError([Problem(_EXTRA_VARIABLE, value, "it on the command line", hint, str(file))])


def with_accelerate(variables: Mapping[str, str], scripts: Path) -> dict[str, str]:
    """Upstream calls `accelerate` by name: this environment's, also where nobody activated it."""
    path = variables.get("PATH", "")
    ours = scripts / "accelerate"
    found = shutil.which("accelerate", path=path)
    if not ours.is_file() or (found is not None and Path(found).samefile(ours)):
        return dict(variables)
    return {**variables, "PATH": f"{scripts}:{path}"}


def _require(package: str, to_install: str) -> None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # without an origin: a folder of that name, such as our own simpletuner/
        raise MachineError(
            f"{package} is not installed beside gracetune\n  found     no package {package} for {sys.executable}\n"
            f"  expected  it in the same environment (Python 3.12 or newer)\n  try       pip install {to_install}"
        )
