"""Suppression of the progress bars that libraries show on their own."""

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
