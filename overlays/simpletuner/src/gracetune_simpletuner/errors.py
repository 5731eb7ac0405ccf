"""What the overlay says when it cannot do what was asked, and how it ends the process then."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from gracetune.extension import GracetuneError, MachineError


class HookError(MachineError):
    """A name of upstream that we wrap is not there, or is something else."""

    def __init__(self, target: str, found: str) -> None:
        super().__init__(
            f"{target}\n  found     {found}\n"
            "  expected  the name this overlay was written for\n"
            "  try       gracetune overlay check simpletuner, or run without the overlay: "
            "gracetune overlay run simpletuner --off -- train"
        )


class ReadError(HookError):
    """An object of upstream has not what we read from it."""

    def __init__(self, what: str, missing: Sequence[str], found: object) -> None:
        super().__init__(f"{what}: {', '.join(missing)}", f"a {type(found).__name__} without it")


class EntryChangedError(GracetuneError):
    """Somebody wrote into a cache entry that is shared by all later epochs."""


def stop(error: GracetuneError) -> NoReturn:
    """Ends the process with a message and no traceback: upstream catches every Exception, and logs it or goes on."""
    sys.stderr.write(f"gracetune overlay: {error}\n")
    raise SystemExit(1) from error


@contextmanager
def stopping() -> Iterator[None]:
    """What we refuse inside ends the process."""
    try:
        yield
    except GracetuneError as error:
        stop(error)
