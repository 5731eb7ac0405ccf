"""Errors of the overlay, and how they end the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from gracetune.extension import GracetuneError, MachineError


class HookError(MachineError):
    """A name of upstream that we wrap is missing or has another type."""

    def __init__(self, target: str, found: str) -> None:
        super().__init__(
            f"{target}\n  found     {found}\n"
            "  expected  the name this overlay was written for\n"
            "  try       gracetune overlay check simpletuner, or run without the overlay: "
            "gracetune overlay run simpletuner --off -- train"
        )


class ReadError(HookError):
    """An object of upstream lacks attributes that we read."""

    def __init__(self, what: str, missing: Sequence[str], found: object) -> None:
        super().__init__(f"{what}: {', '.join(missing)}", f"a {type(found).__name__} without it")


class EntryChangedError(GracetuneError):
    """A cache entry that all epochs share was modified."""


def stop(error: GracetuneError) -> NoReturn:
    """End the process with a message and without a traceback.

    SystemExit is needed because upstream catches every Exception, and logs it or continues.
    """
    sys.stderr.write(f"gracetune overlay: {error}\n")
    raise SystemExit(1) from error


@contextmanager
def stopping() -> Iterator[None]:
    """End the process on any GracetuneError inside the block."""
    try:
        yield
    except GracetuneError as error:
        stop(error)
