"""Silences output of libraries that a user cannot act on."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from gracetune.models.progress_bars import without_bars

_HIDDEN = ("requires torchvision (not installed)",)
"""Transformers' warning about slower image processing. It does not matter: we decode and resize images ourselves."""
_DEPRECATED = r"`torch\.nn\.utils\.weight_norm` is deprecated"
"""Torch's warning about a call in diffusers, which builds Stable Audio's VAE with it."""


@contextmanager
def libraries_quiet(warn: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hide progress bars and the messages above of transformers and diffusers. Their other warnings stay.

    `warn` receives Python warnings, without the line of code that raised them.
    """
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    def is_shown(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in _HIDDEN)

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", _DEPRECATED, FutureWarning)
        if warn is not None:
            warnings.showwarning = lambda message, *_location, **_options: warn(" ".join(str(message).split()))
        for library in (of_transformers, of_diffusers):
            stack.enter_context(without_bars(library))
        for handler in of_transformers.get_logger().handlers:
            handler.addFilter(is_shown)
            stack.callback(handler.removeFilter, is_shown)
        yield
