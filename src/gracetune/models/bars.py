"""Progress bars that libraries draw of their own accord."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_bars(logging: Any) -> Iterator[None]:
    """Inside, a library draws none; `logging` is its own `utils.logging` (transformers and diffusers have the same)."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
