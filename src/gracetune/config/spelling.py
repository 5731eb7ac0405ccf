"""Finding what someone meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice
from typing import Any

from gracetune.config.limits import LONGEST_NAME, MOST_NAMES


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The known name most like a misspelt one, if any is like it. Of very many names, the first ones are compared."""
    if len(name) > LONGEST_NAME:
        return None
    short = (one for one in names if len(one) <= LONGEST_NAME)
    matches = difflib.get_close_matches(name.lower(), list(islice(short, MOST_NAMES)), n=1, cutoff=0.6)
    return matches[0] if matches else None


def misspelt(name: Any, names: Iterable[str], otherwise: str = "", *, write: str = "{}") -> str:
    """What to type instead of a name nobody knows: the nearest one, else `otherwise` (to remove it).

    `write` is how the nearest is written, such as `type: {}`.
    """
    near = nearest(name, names) if isinstance(name, str) else None
    return f"write `{write.format(near)}`" if near else otherwise or f"remove `{name}`"
