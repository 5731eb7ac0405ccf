from __future__ import annotations

import pytest

from gracetune.cli.summary import summary
from gracetune.config import RunConfig


@pytest.mark.parametrize(
    ("first", "last", "words"), [(4, 16, "4 growing to 16 over 10 micro-batches"), (8, 8, "8 from the first step on")]
)
def test_a_ramp_is_told_as_what_it_does(first: int, last: int, words: str) -> None:
    ramp = {"enabled": True, "initial_effective_batch_size": first, "target_effective_batch_size": last,
            "batch_rampup_steps": 10}  # fmt: skip
    config = RunConfig.model_validate(
        {"name": "n", "output_dir": "o", "model": {"family": "sdxl"}, "datasets": [{"id": "a", "path": "p"}],
         "training": {"max_steps": 5, "ramp": ramp}}
    )  # fmt: skip
    assert dict(summary(config))["batch"].startswith(words)
