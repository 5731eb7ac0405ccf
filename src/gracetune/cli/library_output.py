"""What libraries print of their own accord while a command works, and nobody can act on."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from gracetune.models.progress_bars import without_bars

_HIDDEN = ("requires torchvision (not installed)",)
"""We decode and resize ourselves; what falls back there is what we ask for."""
_DEPRECATED = r"`torch\.nn\.utils\.weight_norm` is deprecated"
"""How diffusers builds Stable Audio's VAE."""


@contextmanager
def libraries_quiet(warn: Callable[[str], None] | None = None) -> Iterator[None]:
    """Inside, transformers and diffusers draw no bars and keep such lines to themselves; their warnings stay.

    `warn` is told what Python would write as a warning: the sentence, without the line of code it came from.
    """
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    def wanted(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in _HIDDEN)

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", _DEPRECATED, FutureWarning)
        if warn is not None:
            warnings.showwarning = lambda message, *_device, **_options: warn(" ".join(str(message).split()))
        for library in (of_transformers, of_diffusers):
            stack.enter_context(without_bars(library))
        for handler in of_transformers.get_logger().handlers:
            handler.addFilter(wanted)
            stack.callback(handler.removeFilter, wanted)
        yield
