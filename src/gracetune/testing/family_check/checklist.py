"""The checks in order, and their results."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diffusers.utils import logging

from gracetune.config.registry import FOREIGN_ERRORS
from gracetune.errors import ConfigError
from gracetune.models.progress_bars import errors_only
from gracetune.testing.family_check import activations, adapters, graph_safety, pipeline_step, runs
from gracetune.testing.family_check.case import Check, CheckFailedError, FamilyCase

CHECKS: Final[Mapping[str, Check]] = {
    "encode": runs.check_encoding,
    "predict": pipeline_step.check,
    "adapters": adapters.check_kinds,
    "files": adapters.check_files,
    "compile": runs.check_compilation,
    "cuda graphs": graph_safety.check,
    "footprint": activations.check,
    "samples": runs.check_sampling,
    "resume": runs.check_resume,
}
"""Name -> check. The order of a first implementation: each needs what the ones before it check."""


@dataclass(frozen=True)
class FamilyCheckResult:
    name: str
    ok: bool
    found: str
    expected: str = ""
    hint: str = ""
    """What to do."""
    seconds: float = 0.0


def run_checks(case: FamilyCase, done: Callable[[FamilyCheckResult], None]) -> tuple[FamilyCheckResult, ...]:
    """Run all checks. `done` gets each result as soon as it is there."""
    results = []
    for name in CHECKS:
        began = time.perf_counter()
        result = run_check(name, case)
        results.append(FamilyCheckResult(**{**vars(result), "seconds": round(time.perf_counter() - began, 1)}))
        done(results[-1])
    return tuple(results)


def run_check(name: str, case: FamilyCase) -> FamilyCheckResult:
    """One check. Any error of the family's code is a failed check: it is what the check is for."""
    try:
        with errors_only(logging):  # diffusers warns of unused negative prompts and of files without text encoders
            return FamilyCheckResult(name, True, CHECKS[name](case))
    except CheckFailedError as error:
        return FamilyCheckResult(name, False, error.found, error.expected, error.hint)
    except ConfigError as error:
        first = error.problems[0]
        return FamilyCheckResult(name, False, f"{first.key}: {first.found}", first.expected, first.hint)
    except FOREIGN_ERRORS as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        line = "/".join(Path(frame.filename).parts[-2:])
        found = f"{type(error).__name__}: {error}"
        return FamilyCheckResult(name, False, found, "no error", f"look at {line}:{frame.lineno}")
