"""Suggests the nearest valid name for a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice
from typing import Any

from gracetune.config.limits import LONGEST_NAME, MOST_NAMES


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar of `names`, or None if none is similar. At most `MOST_NAMES` names are compared."""
    if len(name) > LONGEST_NAME:
        return None
    short = (one for one in names if len(one) <= LONGEST_NAME)
    matches = difflib.get_close_matches(name.lower(), list(islice(short, MOST_NAMES)), n=1, cutoff=0.6)
    return matches[0] if matches else None


def misspelt(name: Any, names: Iterable[str], otherwise: str = "", *, write: str = "{}") -> str:
    """Return a hint for an unknown name: to write the nearest one, else `otherwise`, or by default to remove it.

    `write` is the format of the suggestion, such as `type: {}`.
    """
    near = nearest(name, names) if isinstance(name, str) else None
    return f"write `{write.format(near)}`" if near else otherwise or f"remove `{name}`"
