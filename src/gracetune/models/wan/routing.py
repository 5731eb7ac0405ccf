"""Token routing for Wan: kept tokens keep their positions, and their times if each token has its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gracetune.models.spec import BlockRouting, ModelFacts
from gracetune.models.token_routing import rows_of

PATCH = (1, 2, 2)


def _select(given: Mapping[str, Any], kept: Tensor) -> dict[str, Any]:
    """`rotary_emb`: cosine and sine [1, tokens, 1, channels]; `temb`: [B, 6, D], or [B, tokens, 6, D]."""
    chosen: dict[str, Any] = {"rotary_emb": tuple(rows_of(table, kept) for table in given["rotary_emb"])}
    if given["temb"].ndim == 4:
        chosen["temb"] = rows_of(given["temb"], kept)
    return chosen


def _first_frame(latents: Tensor, batch: Mapping[str, Tensor], facts: ModelFacts) -> int:
    """The tokens of a clean first frame (Wan 2.2 5B, image-to-video). They are never routed: the clip depends on
    them."""
    if not (facts.details["expand_timesteps"] and "condition" in batch):
        return 0
    return (latents.shape[-2] // PATCH[1]) * (latents.shape[-1] // PATCH[2])


ROUTING = BlockRouting(PATCH, _select, always=_first_frame)
