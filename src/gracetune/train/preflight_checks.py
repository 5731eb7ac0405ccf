"""Checks before a run: `Checks` collects the errors of many, so that the user sees all of them at once.

checks = Checks()
model = checks.run(lambda: open_model(config))
plan = checks.run(lambda: make_plan(model.value))      # skipped if the model could not be opened
checks.raise_all(runtime)
use(model.value, plan.value)

The checks of `model.base_precision` and of the paths a run will write to are here too. A dangling link, or a folder
where a file belongs, would otherwise be found only when the result is to be written.
"""

from __future__ import annotations

import errno
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from gracetune.checkpoint.errors import CheckpointError
from gracetune.config.registry import FULL_FINETUNE, AdapterKind
from gracetune.config.run_config import RunConfig
from gracetune.data.copies.errors import CopyError
from gracetune.errors import ConfigError, GracetuneError, MachineError, Problem
from gracetune.models.eight_bit_linear import check_fp8
from gracetune.models.spec import Expert
from gracetune.optim.aitoolkit_rates import NotImportableError
from gracetune.planning.processes import sharded_bits_problem
from gracetune.storage.os_errors import FileError, problem_of
from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.report.write import LOG_FILE
from gracetune.train.output import CONFIG, RunFolder
from gracetune.train.runtime import Runtime

T = TypeVar("T")


class _UnknownValueError(Exception):
    """A check needs the value of an earlier check that failed. `Checks.run` catches this error."""


class CheckResult(Generic[T]):
    """The value of a check, or nothing if it failed or was skipped."""

    def __init__(self, *found: T, is_rejected: bool = False) -> None:
        self._found = found
        self.is_rejected = is_rejected

    @property
    def is_known(self) -> bool:
        return bool(self._found)

    @property
    def value(self) -> T:
        if not self._found:
            raise _UnknownValueError
        return self._found[0]


class Checks:
    """Runs checks one after the other and keeps their errors. A check that needs the value of a failed one is skipped.

    `known` are problems found earlier, each with its key. Further problems of the same key are dropped.
    """

    def __init__(self, known: Iterable[tuple[str, Problem]] = ()) -> None:
        found = [*known]
        self._known = frozenset(key for key, _ in found)
        self._errors: list[GracetuneError | TelemetryError] = []
        if found:
            self._errors.append(ConfigError(dict.fromkeys(problem for _, problem in found)))

    def has_known_problem(self, key: str) -> bool:
        return key in self._known

    @property
    def rejected(self) -> bool:
        return bool(self._errors)

    def run(self, check: Callable[[], T]) -> CheckResult[T]:
        """Run one check and keep its error. Errors of other types are bugs and are raised at once."""
        try:
            return CheckResult(check())
        except _UnknownValueError:
            pass
        except (GracetuneError, TelemetryError) as error:
            if not self._known or any(problem.key not in self._known for problem in problems_of(error)):
                self._errors.append(error)
            return CheckResult(is_rejected=True)
        return CheckResult()

    def raise_all(self, runtime: Runtime) -> None:
        """Raise the errors, if any: a single one as it is, several as one ConfigError. All ranks raise together."""
        if not runtime.highest(int(self.rejected)):
            return
        if not self._errors:
            raise MachineError("another process of this run rejected it; its message says why")
        if len(self._errors) == 1:
            raise self._errors[0]
        raise ConfigError(dict.fromkeys(problem for error in self._errors for problem in problems_of(error)))


def problems_of(error: GracetuneError | TelemetryError) -> tuple[Problem, ...]:
    """The problems in an error, each with what was found, what is expected and what to type."""
    if isinstance(error, ConfigError):
        return error.problems
    if isinstance(error, CheckpointError | CopyError | NotImportableError | FileError):
        return (error.problem,)
    if isinstance(error, TelemetryError):
        return (Problem(error.key, error.found, error.expected, error.hint),)
    return (Problem("this run", str(error), "a run that can start", "what was found ends with the remedy"),)


def reject_eight_bits(config: RunConfig, runtime: Runtime) -> None:
    """Reject fp8 on a device that cannot compute in it, and 8-bit weights with FSDP."""
    precision = config.model.base_precision
    if precision == "fp8":
        check_fp8(runtime.device)
    if precision in ("fp8", "int8") and runtime.is_sharded:
        raise ConfigError([sharded_bits_problem(precision)])


# -- output paths ------------------------------------------------------------------------------------------------------


def check_output_paths(folder: RunFolder, experts: Sequence[Expert], kind: AdapterKind) -> None:
    """Raise ConfigError if something of the wrong type has one of the run's names.

    Results of an earlier run are checked by `RunFolder.reject_finished`.
    """
    folders, files = [folder.path, folder.samples, folder.logs], [folder.path / CONFIG, folder.path / LOG_FILE]
    with folder.config_errors():
        steps = folder.steps()
    for step in (None, *steps):
        if kind == FULL_FINETUNE:
            model = folder.model(step)
            folders += [model, *(model / one.component for one in experts)]
        else:
            files += [folder.adapter(one.name, step) for one in experts]
    problems = [*_wrong_types(folders, "a folder"), *_wrong_types(files, "a file")]
    if problems:
        raise ConfigError(problems)


def _wrong_types(paths: Sequence[Path], expected: str) -> Iterator[Problem]:
    for path in paths:
        try:
            found = _kind(path)
        except OSError as error:
            yield problem_of(error, "output_dir", path, elsewhere="--set output_dir=FOLDER", then="")
            continue
        if found not in (None, expected):
            hint = f"look at `ls -ld {shlex.quote(str(path))}` and move it away; or --set output_dir=FOLDER"
            yield Problem(
                "output_dir", f"{path.name}, {found}", f"nothing of this name, or {expected}", hint, str(path)
            )


def _kind(path: Path) -> str | None:
    """What is at this path; None if nothing is."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        # Below a file there is nothing. The file itself is reported under its own path.
        return f"a link to {path.readlink()}, which does not exist" if path.is_symlink() else None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return "a link that leads back to itself"
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a file" if stat.S_ISREG(mode) else "neither a file nor a folder"
