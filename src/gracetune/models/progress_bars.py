"""Suppression of the progress bars and warnings that libraries show on their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_bars(logging: Any) -> Iterator[None]:
    """Hide a library's progress bars in this context. `logging` is its `utils.logging` (transformers or diffusers)."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def errors_only(logging: Any) -> Iterator[None]:
    """Hide a library's warnings in this context. `logging` as above."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
