"""Token routing for FLUX.1: caption positions stay, kept image tokens keep theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gracetune.models.common.latent_packing import PATCH, references_of
from gracetune.models.spec import BlockRouting
from gracetune.models.token_routing import rows_of


def _select(given: Mapping[str, Any], kept: Tensor) -> dict[str, Any]:
    """`image_rotary_emb`: cosine and sine [caption and image tokens, channels]. With several samples, [B, ...]."""
    caption = given["encoder_hidden_states"].shape[1]

    def own(table: Tensor) -> Tensor:
        shared = table[None, :caption].expand(len(kept), -1, -1)
        tables = torch.cat([shared, rows_of(table[None, caption:], kept)], dim=1)
        return tables if len(kept) > 1 else tables[0]

    return {"image_rotary_emb": tuple(own(table) for table in given["image_rotary_emb"])}


ROUTING = BlockRouting((PATCH, PATCH), _select, answer=1, references=references_of)
