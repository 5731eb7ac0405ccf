"""Encode passes on a real GPU: memory that really runs out, and memory that really comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu.isolation import held_bytes
from gracetune.cache.session import build
from gracetune.models.encoders import encoders_of
from unit.cache.tiny_runs import Run, Watched, contents
from unit.data.folders import image, write

pytestmark = pytest.mark.gpu


@pytest.fixture
def run(tmp_path: Path, tiny_model: Callable[[str, str], Path]) -> Run:
    files = {f"{number}.png": image(512, 512, seed=number) for number in range(16)}
    found = [{"path": str(write(tmp_path / "p", dict(files))), "resolution": 512.0}]
    run = Run.of(tmp_path, "sdxl", tiny_model("sdxl", "base-1.0"), found, cache={"vae_batch_size": 16})
    run.encoders = Watched(encoders_of(run.config, torch.device("cuda")))
    return run


def test_both_encoders_give_everything_back(run: Run) -> None:
    before = held_bytes()
    used: list[int] = []
    run.encoders.before_encode = lambda requested: used.append(torch.cuda.memory_allocated())
    with run.caches() as caches:
        assert build(run.config, run.index, run.encoders, caches).encoded == 17
    assert min(used) > before
    assert held_bytes() <= before


def test_a_full_gpu_halves_the_batch(run: Run) -> None:
    """A limit between what 4 and 16 images need, measured in this run."""
    before = held_bytes()
    with run.caches() as caches:
        encoder = run.encoders.load_latents()
        samples = [run.index.load(ref) for ref in run.index.cacheable()]
        peaks = []
        for count in (4, 16):
            torch.cuda.reset_peak_memory_stats()
            encoder.encode(samples[:count])
            peaks.append(torch.cuda.max_memory_allocated())
        encoder.close()
        total = torch.cuda.get_device_properties(0).total_memory
        try:
            torch.cuda.set_per_process_memory_fraction((peaks[0] + peaks[1]) / 2 / total)
            found = build(run.config, run.index, run.encoders, caches)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.latents.encoded == 16
    assert found.latents.batch_size < 16
    assert contents(run.folders.latents("d0"), run.folders.text()).keys() == run.keys()
    assert held_bytes() <= before
