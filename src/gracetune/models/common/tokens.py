"""Captions as tokens: made once for each caption, and which of them were too long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class CutTexts:
    """Texts that a text encoder reads the beginning of only, each once, by what it reads: `77 tokens`."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, None]] = {}

    def add(self, limit: str, texts: Iterable[str]) -> None:
        for text in texts:
            self._found.setdefault(limit, {})[text] = None

    @property
    def by_limit(self) -> Mapping[str, Sequence[str]]:
        return {limit: tuple(texts) for limit, texts in self._found.items()}


def padded_tokens(tokenizer: Any, texts: Sequence[str], length: int) -> tuple[Any, list[int]]:
    """Token ids and their mask, [B, length] each, and the numbers of the texts that have more tokens.

    Always the full length: an embedding's last bits must not depend on the captions it is computed with. Whether a text
    was cut is learnt without a second look at it: a tokenizer can return the rest too, as further rows.
    """
    tokens = tokenizer(
        [*texts],
        padding="max_length",
        max_length=length,
        truncation=True,
        return_overflowing_tokens=tokenizer.is_fast,  # the others return it in another form
        return_tensors="pt",
    )
    owners = tokens.pop("overflow_to_sample_mapping", None)
    if owners is None or len(owners) == len(texts):
        return tokens, []
    rows = owners.tolist()
    first = [rows.index(number) for number in range(len(texts))]
    for name in [*tokens]:
        tokens[name] = tokens[name][first]
    return tokens, [number for number, count in Counter(rows).items() if count > 1]
