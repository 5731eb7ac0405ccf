"""Memory of text encoders that several families use. Imports no torch."""

from __future__ import annotations

from gracetune.models.footprint import FootprintEncoder

QWEN3_4B = FootprintEncoder(
    "text encoder (Qwen3 4B)", 4_022_468_096, working=400_904, tokens=512, works_while_sampling=False
)
QWEN3_8B = FootprintEncoder(
    "text encoder (Qwen3 8B)", 8_190_735_360, working=533_000, tokens=512, works_while_sampling=False
)
MISTRAL_SMALL_3 = FootprintEncoder(
    "text encoder (Mistral Small 3)", 24_011_361_280, working=791_048, tokens=512, works_while_sampling=False
)
