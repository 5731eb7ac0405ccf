"""Finding what someone meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The known name most like a misspelt one, if any is like it."""
    matches = difflib.get_close_matches(name.lower(), list(names), n=1, cutoff=0.6)
    return matches[0] if matches else None
