"""Collect the errors of many checks, so that the user sees all of them at once.

checks = Checks()
model = checks.run(lambda: open_model(config))
plan = checks.run(lambda: make_plan(model.value))      # skipped if the model could not be opened
checks.raise_all(runtime)
use(model.value, plan.value)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from gracetune.checkpoint.errors import CheckpointError
from gracetune.data.copies.errors import CopyError
from gracetune.errors import ConfigError, GracetuneError, MachineError, Problem
from gracetune.optim.aitoolkit_rates import NotImportableError
from gracetune.storage.os_errors import FileError
from gracetune.telemetry.errors import TelemetryError
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

    def is_known(self, key: str) -> bool:
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
