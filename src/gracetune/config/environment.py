"""The only module that touches `os.environ`.

`Environment.capture()` takes a snapshot, which is passed to all other code. `claim_allocator_options()` removes the
unified-memory options from PyTorch's allocator string before torch reads it, because a stock PyTorch raises at the
first CUDA call if the string has a key it does not know.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gracetune.config.memory_options import OPTION_NAMES, parse_option, split_alloc_conf
from gracetune.config.spelling import nearest
from gracetune.errors import Problem

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""In PyTorch's own order: the first that is set is the one it reads."""
HINTS_VARIABLE = "SIMPLETUNER_GH200_ENABLE_UVM_HINTS"
GH200_PREFIX = "GH200_UVM_"
SIGUSR1_VARIABLE = "GRACETUNE_SIGUSR1"
"""What SIGUSR1 does to a run: `validate` (the default) or `stop`. This is not a config option, because it depends on
how this machine's scheduler warns jobs, not on the job."""

_GH200_OPTIONS = {f"GH200_{name.upper()}": name for name in OPTION_NAMES if name != "use_uvm"}
_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Environment:
    """A snapshot of the process environment."""

    variables: Mapping[str, str]

    @classmethod
    def capture(cls) -> Environment:
        return cls(dict(os.environ))

    def get(self, name: str) -> str | None:
        return self.variables.get(name)

    @property
    def cache_folder(self) -> Path | None:
        """gracetune's folder in the user's cache folder; None if neither XDG_CACHE_HOME nor HOME is set."""
        named, home = self.get("XDG_CACHE_HOME"), self.get("HOME")
        if named and Path(named).is_absolute():
            return Path(named) / "gracetune"
        return Path(home) / ".cache" / "gracetune" if home else None

    @property
    def hub_offline(self) -> str | None:
        """The setting that forbids access to the Hugging Face hub, such as `HF_HUB_OFFLINE=1`; else None."""
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):  # the second counts where the first is unset or empty
            value = self.get(name)
            if value:
                return f"{name}={value}" if value.upper() in ("1", "ON", "YES", "TRUE") else None
        return None

    @property
    def stops_on_sigusr1(self) -> bool:
        return (self.get(SIGUSR1_VARIABLE) or "").strip() == "stop"

    def sigusr1_problems(self) -> list[Problem]:
        given = self.get(SIGUSR1_VARIABLE) or ""
        if given.strip() in ("", "stop", "validate"):
            return []
        return [Problem(SIGUSR1_VARIABLE, given, "validate or stop", f"export {SIGUSR1_VARIABLE}=stop")]

    def without_memory_options(self) -> Environment:
        """Return a copy without memory options and without the SIGUSR1 setting."""
        ours = (*ALLOCATOR_VARIABLES, HINTS_VARIABLE, SIGUSR1_VARIABLE)
        kept = {name: value for name, value in self.variables.items() if name not in ours}
        return Environment({name: value for name, value in kept.items() if not name.startswith(GH200_PREFIX)})


@dataclass(frozen=True)
class MemorySetting:
    """A memory option set in the environment."""

    value: Any
    variable: str


@dataclass(frozen=True)
class EnvironmentMemory:
    """All memory options of the environment. `GH200_UVM_*` variables override the allocator string."""

    settings: dict[str, MemorySetting] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def memory_settings(environment: Environment) -> EnvironmentMemory:
    settings: dict[str, MemorySetting] = {}
    problems: list[Problem] = []
    _from_allocator_strings(environment, settings, problems)
    _from_gh200_variables(environment, settings, problems)
    _from_hints_switch(environment, settings, problems)
    return EnvironmentMemory(settings, tuple(problems))


def _from_allocator_strings(env: Environment, settings: dict[str, MemorySetting], problems: list[Problem]) -> None:
    for variable in reversed(ALLOCATOR_VARIABLES):
        split = split_alloc_conf(env.get(variable) or "", variable)
        problems += split.problems
        settings |= {name: MemorySetting(value, variable) for name, value in split.options.items()}


def _from_gh200_variables(env: Environment, settings: dict[str, MemorySetting], problems: list[Problem]) -> None:
    given = [name for name in sorted(env.variables) if name.startswith(GH200_PREFIX) and env.variables[name].strip()]
    taken: list[str] = []
    for variable in given:
        if variable not in _GH200_OPTIONS:
            near = nearest(variable.lower(), [name.lower() for name in _GH200_OPTIONS])
            hint = f"export {near.upper()}=..." if near else f"unset {variable}"
            problems.append(Problem(variable, "an unknown variable", f"one of {', '.join(_GH200_OPTIONS)}", hint))
            continue
        value = parse_option(_GH200_OPTIONS[variable], env.variables[variable].strip(), variable)
        if isinstance(value, Problem):
            problems.append(value)
            continue
        settings[_GH200_OPTIONS[variable]] = MemorySetting(value, variable)
        taken.append(variable)
    if taken:  # setting any of these options implies use_uvm, whatever the allocator string says
        settings["use_uvm"] = MemorySetting(True, taken[0])


def _from_hints_switch(env: Environment, settings: dict[str, MemorySetting], problems: list[Problem]) -> None:
    text = env.get(HINTS_VARIABLE)
    if text is None or not text.strip():
        return
    value = _SWITCHES.get(text.strip().lower())
    if value is None:
        problems.append(Problem(HINTS_VARIABLE, text, "1 or 0", f"export {HINTS_VARIABLE}=1"))
    else:
        settings["enable_uvm_hints"] = MemorySetting(value, HINTS_VARIABLE)


def claim_allocator_options(environ: MutableMapping[str, str] | None = None, *, torch_takes_them: bool) -> list[str]:
    """Remove our options from the allocator strings. Returns one log line for each string that changed.

    Call this after `Environment.capture()` and before torch initializes CUDA. A patched PyTorch keeps its string.
    """
    environ = os.environ if environ is None else environ
    lines = []
    for variable in ALLOCATOR_VARIABLES:
        split = split_alloc_conf(environ.get(variable, ""), variable)
        if torch_takes_them or not (split.options or split.problems):
            continue
        if split.rest:
            environ[variable] = split.rest
        else:
            del environ[variable]
        taken = ", ".join(split.options) or "options with errors"
        left = f"PyTorch gets {split.rest}" if split.rest else "nothing is left for PyTorch"
        lines.append(f"{variable}: took {taken} for gracetune's memory layer; {left}")
    return lines


def torch_accepts_uvm_options(torch_folder: Path | None = None) -> bool:
    """Whether the installed PyTorch is patched to parse the options itself.

    Only then does its allocator library contain an option's name. The library file is searched, because importing
    torch to ask it would already parse the allocator string.
    """
    if torch_folder is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return False
        torch_folder = Path(spec.origin).parent
    try:
        return b"uvm_oversubscription_ratio" in (torch_folder / "lib" / "libc10_cuda.so").read_bytes()
    except OSError:  # a build without CUDA has no such library
        return False


def make_cublas_deterministic() -> tuple[str, bool]:
    """Give cuBLAS a fixed workspace, which it needs for repeatable results and reads when CUDA starts.

    Returns the setting in effect, and whether it is ours: one that is already set stays.
    """
    ours = "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    return os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ours
