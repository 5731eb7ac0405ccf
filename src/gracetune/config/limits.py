"""How large a value may be where that depends on another one; bounds of a single field stand in its type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gracetune.config.adapter_kinds import algorithms
from gracetune.config.dataset_config import Dataset
from gracetune.config.draft import Path
from gracetune.config.rules import Broken
from gracetune.config.run_config import Adapter, RunConfig

LARGEST_RANK = 16_384
"""Of factors that are as wide as the rank, whatever the matrix is: no model here has a matrix with more to learn."""
MOST_MEGAPIXELS = 64.0
"""8000 x 8000. Whoever writes more has written pixels."""


def beyond_limits(config: RunConfig) -> Iterator[Broken]:
    yield from _ranks(config.adapter)
    for index, dataset in enumerate(config.datasets):
        yield from _megapixels(dataset, ("datasets", index))


def _ranks(adapter: Adapter) -> Iterator[Broken]:
    ranks: list[tuple[Path, Any, Any]] = [
        (("adapter", "rank"), adapter.kind, adapter.rank),
        (("adapter", "conv_rank"), adapter.kind, adapter.conv_rank),
    ]
    for module, options in adapter.by_module.items():
        kind = options.get("algo", adapter.kind)
        ranks += [(("adapter", "by_module", module, name), kind, options.get(name)) for name in ("dim", "linear_dim")]
    wide = [one for one in algorithms() if one.rank_is_width]
    limited = [*(one.name for one in wide), *(one.lycoris_name for one in wide if one.lycoris_name is not None)]
    for path, kind, rank in ranks:
        if kind in limited and isinstance(rank, int | float) and rank > LARGEST_RANK:
            yield Broken(path, str(rank), f"at most {LARGEST_RANK:,} for {kind}",
                         "write 16, for example; whole matrices are learnt by full_delta, or by lokr with "
                         "`full_rank: true`", (("adapter", "kind"),))  # fmt: skip


def _megapixels(dataset: Dataset, path: Path) -> Iterator[Broken]:
    if dataset.resolution_type != "area":
        return
    for name, size in (("resolution", dataset.resolution), ("downsample_to", dataset.downsample_to)):
        if size is not None and size > MOST_MEGAPIXELS:
            yield Broken((*path, name), f"{size:g} megapixels",
                         f"at most {MOST_MEGAPIXELS:g} with resolution_type area",
                         f"if {size:g} is in pixels, write `resolution_type: pixel_area`, or {size * size / 1e6:.2g} "
                         "for as many megapixels", ((*path, "resolution_type"),))  # fmt: skip
