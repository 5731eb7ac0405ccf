"""Token routing for Qwen-Image: caption positions stay, kept image tokens keep theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gracetune.models.common.latent_packing import PATCH, references_of
from gracetune.models.spec import BlockRouting
from gracetune.models.token_routing import rows_of


def _select(given: Mapping[str, Any], kept: Tensor) -> dict[str, Any]:
    """`image_rotary_emb`: tables of the image [tokens, pairs, 2] and of the caption. `modulate_index` [B, tokens]:
    marks reference tokens (Edit-2511)."""
    image, caption = given["image_rotary_emb"]
    chosen: dict[str, Any] = {"image_rotary_emb": (rows_of(image[None], kept), caption)}
    if given["modulate_index"] is not None:
        chosen["modulate_index"] = rows_of(given["modulate_index"], kept)
    return chosen


ROUTING = BlockRouting((PATCH, PATCH), _select, answer=1, references=references_of)
