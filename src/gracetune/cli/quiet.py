"""What libraries print of their own accord while a command works, and nobody can act on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gracetune.models.bars import without_bars

_NOT_TOLD = ("requires torchvision (not installed)",)
"""We decode and resize ourselves; what falls back there is what we ask for."""


@contextmanager
def libraries_quiet() -> Iterator[None]:
    """Inside, transformers and diffusers draw no bars and keep such lines to themselves; their warnings stay."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    def wanted(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in _NOT_TOLD)

    with ExitStack() as stack:
        for library in (of_transformers, of_diffusers):
            stack.enter_context(without_bars(library))
        for handler in of_transformers.get_logger().handlers:
            handler.addFilter(wanted)
            stack.callback(handler.removeFilter, wanted)
        yield
