from __future__ import annotations

from gracetune.bench.cache import CacheBenchSizes, run
from gracetune.cli.bench import BENCHES
from unit.cache.sample_caches import this_machine


def test_every_row_is_measured() -> None:
    """Small, so the bars mean nothing here; what is measured is checked by the bench itself, which raises."""
    rows = run(this_machine(), CacheBenchSizes(samples=12, loaded=40, known=300, rounds=1))
    rows = [row for row in rows if not row.name.startswith(("wait_", "loss_"))]  # of a GPU
    assert [row.name for row in rows] == [
        "epoch_over_torch_load",
        "epoch_over_one_file",
        "loading_over_reads",
        "large_cache_open",
        "large_cache_find_one",
        "large_cache_find_all",
    ]
    assert all(row.value > 0 and row.detail for row in rows)
    assert [row.name for row in rows if not row.bar] == ["epoch_over_one_file"]
    assert "cache" in BENCHES
