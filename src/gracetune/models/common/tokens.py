"""Tokenizing captions once, and recording which ones were truncated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class TruncatedTexts:
    """Texts of which the text encoder read only the beginning, without duplicates, by limit (`77 tokens`)."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, None]] = {}

    def add(self, limit: str, texts: Iterable[str]) -> None:
        for text in texts:
            self._found.setdefault(limit, {})[text] = None

    @property
    def by_limit(self) -> Mapping[str, Sequence[str]]:
        return {limit: tuple(texts) for limit, texts in self._found.items()}


def padded_tokens(tokenizer: Any, texts: Sequence[str], length: int) -> tuple[Any, list[int]]:
    """Token ids and attention mask, [B, length] each, and the indices of the texts that were truncated.

    Always padded to the full length, because an embedding must not depend on the other captions of its batch, not even
    in its last bits. Truncation is detected without tokenizing twice: fast tokenizers return the rest as further rows.
    """
    tokens = tokenizer(
        [*texts],
        padding="max_length",
        max_length=length,
        truncation=True,
        return_overflowing_tokens=tokenizer.is_fast,  # slow tokenizers return it in another form
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
