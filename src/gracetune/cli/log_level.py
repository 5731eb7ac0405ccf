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
    """Looks up `sys.stderr` for every line: a progress bar replaces it and prints lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


@contextmanager
def logging_at(level: LogLevel) -> Iterator[None]:
    """Inside, the `gracetune` logger prints lines of this level and above as `LEVEL: message`."""
    logger, handler = logging.getLogger("gracetune"), _Stderr()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    level_before, propagate_before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level.name)
    logger.propagate = False  # a library that gives the root logger a handler would print every line twice
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)
        logger.propagate = propagate_before
