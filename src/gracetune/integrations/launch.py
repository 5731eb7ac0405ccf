"""Start an upstream by its own command, with our module in front of its training script or without it."""

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
"""The versions of docs/upstream.md, which says why: the newest releases are incompatible with each other."""
_EXTRA = "accelerate_extra_args"
_EXTRA_VARIABLE = "ACCELERATE_EXTRA_ARGS"


def run_upstream(upstream: str, arguments: Sequence[str], *, off: bool, environment: Environment) -> int:
    """Run upstream and return its exit code.

    `arguments` are those of upstream's command line. With `off` they are passed on unchanged.
    """
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
    _restore_ctrl_c()
    code = _wait_for(subprocess.Popen([sys.executable, "-m", "simpletuner", *arguments], env=variables))
    return code if code >= 0 else 128 - code


def _restore_ctrl_c() -> None:
    """Handle SIGINT again.

    Shells make background jobs ignore it; upstream would inherit that and could not be stopped.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _wait_for(process: subprocess.Popen[bytes]) -> int:
    """Wait for upstream and return its exit code.

    On Ctrl-C the terminal signals upstream too, which then ends its training processes. SIGTERM would end only its
    command and leave them running, so we forward SIGTERM as SIGINT.
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
    """Arguments and environment that make accelerate run our module, which runs train.py. The user's own values are
    kept.

    Upstream reads the argument, except with `example=`, where it reads the variable. So we set both.
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
    """Split off the user's extra arguments for accelerate: (other arguments, extra arguments)."""
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
    """Reject env files that set extra arguments for accelerate.

    Upstream sources these files later, and the argument that we add would override them.
    """
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
    """Put this environment's `accelerate` first on the PATH, since upstream calls it by name."""
    path = variables.get("PATH", "")
    ours = scripts / "accelerate"
    found = shutil.which("accelerate", path=path)
    if not ours.is_file() or (found is not None and Path(found).samefile(ours)):
        return dict(variables)
    return {**variables, "PATH": f"{scripts}:{path}"}


def _require(package: str, to_install: str) -> None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # no origin: a mere folder of that name, such as our own simpletuner/
        raise MachineError(
            f"{package} is not installed beside gracetune\n  found     no package {package} for {sys.executable}\n"
            f"  expected  it in the same environment (Python 3.12 or newer)\n  try       pip install {to_install}"
        )
