"""`--log-level`: which lines of the `gracetune` logger are printed on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"


class _Stderr(logging.Handler):
    """Prints to the current `sys.stderr`: a progress bar replaces it, so that lines appear above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


@contextmanager
def logging_at(level: LogLevel) -> Iterator[None]:
    """Make the `gracetune` logger print lines of this level and above, as `LEVEL: message`."""
    logger, handler = logging.getLogger("gracetune"), _Stderr()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    level_before, propagate_before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level.name)
    logger.propagate = False  # if a library adds a handler to the root logger, every line would be printed twice
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)
        logger.propagate = propagate_before
